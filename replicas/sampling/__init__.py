"""The one rule for choosing a token, its noise, and which draft tokens are worth verifying."""

from replicas.sampling.choice import SamplingBatch, choose, guess, guess_and_rate
from replicas.sampling.selection import Selection, select

__all__ = [
    "SamplingBatch",
    "Selection",
    "choose",
    "guess",
    "guess_and_rate",
    "select",
]
