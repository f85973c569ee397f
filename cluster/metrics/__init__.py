"""What Lockstep counts, and how others read it: at `/metrics`, and through Ray.

`exposition` and `ray_sink` are imported by themselves: the one has a library that a pool which is
started anew does without, the other has Ray.
"""

from cluster.metrics.calls import CallRecord
from cluster.metrics.meters import FrontendMeter, PoolMeter, gauges
from cluster.metrics.sums import Sink, Sum, Sums
from cluster.metrics.table import METRICS, Metric

__all__ = [
    "METRICS",
    "CallRecord",
    "FrontendMeter",
    "Metric",
    "PoolMeter",
    "Sink",
    "Sum",
    "Sums",
    "gauges",
]
