"""The one rule for choosing a token, and its noise."""

from replicas.sampling.choice import SamplingBatch, choose, guess

__all__ = ["SamplingBatch", "choose", "guess"]
