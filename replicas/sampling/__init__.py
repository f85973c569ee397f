"""The one rule for choosing a token, its noise, and which draft tokens are worth verifying."""

from replicas.sampling.choice import SamplingBatch, choose, choose_and_rate, sampling_batch
from replicas.sampling.selection import Selection, select

__all__ = [
    "SamplingBatch",
    "Selection",
    "choose",
    "choose_and_rate",
    "sampling_batch",
    "select",
]
