"""What proposes draft tokens: the protocol that `eqspec` speaks, and the drafters behind it."""

from replicas.drafters.model import ModelDrafter
from replicas.drafters.protocol import Ask, Drafter, Proposal, Seen
from replicas.drafters.suffix import SuffixDrafter

__all__ = ["Ask", "Drafter", "ModelDrafter", "Proposal", "Seen", "SuffixDrafter"]
