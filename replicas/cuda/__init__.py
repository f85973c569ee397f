"""What only a GPU needs: forward passes that are recorded once and replayed."""

from replicas.cuda.graphs import FixedPass, GraphedModel, Kind, buckets
