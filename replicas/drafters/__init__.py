"""What proposes draft tokens: the protocol that a step speaks, and each method's drafter."""

from replicas.drafters.methods import METHODS
from replicas.drafters.protocol import Ask, Drafter, DraftSource, Proposal, Seen

__all__ = [
    "METHODS",
    "Ask",
    "DraftSource",
    "Drafter",
    "Proposal",
    "Seen",
]
