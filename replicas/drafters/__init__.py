"""What proposes draft tokens: the protocol that `eqspec` speaks; `methods` knows the drafters."""

from replicas.drafters.protocol import Ask, Drafter, DraftSource, Proposal, Seen

__all__ = ["Ask", "DraftSource", "Drafter", "Proposal", "Seen"]
