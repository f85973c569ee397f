"""Which batch a replica gets next: placement, prefill, grouping, dispatch."""

from scheduler.batching.dispatch import Dispatcher
from scheduler.batching.grouping import passes_bound
from scheduler.batching.placement import lightest, rows_to_move
