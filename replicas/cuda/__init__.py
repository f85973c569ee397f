"""What only a GPU needs: forward passes that are recorded once and replayed."""

from replicas.cuda.graphs import FixedPass, GraphedModel, Kind, buckets
from replicas.cuda.recording import record, recording_stream, warm_up

__all__ = [
    "FixedPass",
    "GraphedModel",
    "Kind",
    "buckets",
    "record",
    "recording_stream",
    "warm_up",
]
