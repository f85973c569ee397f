"""What only a GPU needs: forward passes that are recorded once and replayed."""

from replicas.cuda.graphs import FixedPass, GraphedModel, Kind, NotRecorded, buckets

__all__ = ["FixedPass", "GraphedModel", "Kind", "NotRecorded", "buckets"]
