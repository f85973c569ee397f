"""Which batch a replica gets next: placement, prefill, grouping, rebalancing, dispatch."""

from scheduler.batching.dispatch import Dispatcher
from scheduler.batching.grouping import passes_bound
from scheduler.batching.placement import best_replica
from scheduler.batching.rebalancing import lightest, rows_to_move

__all__ = ["Dispatcher", "best_replica", "lightest", "passes_bound", "rows_to_move"]
