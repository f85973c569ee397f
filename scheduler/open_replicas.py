"""The replicas that take sequences, by load: who looks for a place goes through the lightest first.

Loads and places change in every order and are asked for when somebody comes or moves, so a replica
is only noted, and put where it belongs when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from scheduler.config import SchedulerConfig
from scheduler.residents import Replica

_LoadKey = tuple[int, str]


class OpenReplicas:
    """Two sorted lists; O(log n) comparisons for each replica that has changed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._residents_max = config.residents_max
        self._orders_max = config.orders_in_flight_max
        self._open: list[_LoadKey] = []
        self._free: list[_LoadKey] = []
        self._changed: dict[str, Replica] = {}

    def changed(self, replica: Replica) -> None:
        """Its residents or orders are others, or it drains or is gone."""
        self._changed[replica.id] = replica

    def open(self) -> list[_LoadKey]:
        """(load, id) of the replicas that take sequences, the lightest first."""
        self._update()
        return self._open

    def free(self) -> list[_LoadKey]:
        """The same for those of them that have a place for an order."""
        self._update()
        return self._free

    def _update(self) -> None:
        for replica in self._changed.values():
            takes = not replica.draining and replica.load < self._residents_max
            key = (replica.load, replica.id) if takes else None
            free_key = key if len(replica.orders) < self._orders_max else None
            _exchange(self._open, replica.open_key, key)
            _exchange(self._free, replica.free_key, free_key)
            replica.open_key, replica.free_key = key, free_key
        self._changed.clear()


def _exchange(index: list[_LoadKey], before: _LoadKey | None, after: _LoadKey | None) -> None:
    """Replaces an entry of a sorted list; None stands for no entry."""
    if before == after:
        return
    if before is not None:
        del index[bisect_left(index, before)]
    if after is not None:
        insort(index, after)
