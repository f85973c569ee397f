"""The one rule for choosing a token, and its noise."""

from replicas.sampling.choice import SamplingBatch, choose, guess
from replicas.sampling.noise import Noise

__all__ = [
    "Noise",
    "SamplingBatch",
    "choose",
    "guess",
]
