"""The one rule for choosing a token, its noise, and how the likeliest tokens are found."""

from replicas.sampling.choice import SamplingBatch, choose, guess
from replicas.sampling.columns import likeliest
from replicas.sampling.noise import Noise
