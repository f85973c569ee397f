"""What proposes draft tokens: the protocol that `eqspec` speaks, and the drafters behind it."""

from replicas.drafters.model import ModelDrafter
from replicas.drafters.protocol import Ask, Cost, Drafter, Proposal, Seen

__all__ = ["Ask", "Cost", "Drafter", "ModelDrafter", "Proposal", "Seen"]
