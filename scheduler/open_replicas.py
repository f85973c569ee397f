"""The replicas that take sequences, by load: who looks for a place goes through the lightest first.

Loads and places change in every batch and are asked for when somebody comes or moves, so a replica
is only noted, and put where it belongs when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from scheduler.config import SchedulerConfig
from scheduler.residents import Replica

_LoadKey = tuple[int, str]


class OpenReplicas:
    """Two sorted lists; O(log n) comparisons for each replica that has changed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._residents_max = config.residents_max
        self._batches_max = config.batches_in_flight_max
        self._open: list[_LoadKey] = []
        self._free: list[_LoadKey] = []
        self._changed: dict[Replica, None] = {}
        """By the record, not by the id: one that is gone and one that has come again under its id
        each have an entry to be put right."""

    def changed(self, replica: Replica) -> None:
        """Its residents or batches are others, or it drains or is gone."""
        self._changed[replica] = None

    def open(self) -> list[_LoadKey]:
        """(load, id) of the replicas that take sequences, the lightest first."""
        self._update()
        return self._open

    def free(self) -> list[_LoadKey]:
        """The same for those of them that have a place for a batch."""
        self._update()
        return self._free

    def check_integrity(self, replicas: Iterable[Replica]) -> None:
        """Asserts that nothing changed unsaid, and changes nothing: who asks next will be told of
        these replicas. O(all of them)."""
        known = [*replicas, *(one for one in self._changed if one.draining)]
        known = list(dict.fromkeys(known))
        entries = sorted(one.open_key for one in known if one.open_key is not None)
        assert self._open == entries, "the index of open replicas is wrong"
        entries = sorted(one.free_key for one in known if one.free_key is not None)
        assert self._free == entries, "the index of replicas with a place is wrong"
        for one in known:
            if one not in self._changed:
                keys = (one.open_key, one.free_key)
                assert keys == self._keys(one), f"replica {one.id} has changed and nobody said so"

    def _keys(self, replica: Replica) -> tuple[_LoadKey | None, _LoadKey | None]:
        """Where it belongs in both indices; None: nowhere."""
        if replica.draining or replica.load >= self._residents_max:
            return None, None
        key = (replica.load, replica.id)
        return key, key if len(replica.batches) < self._batches_max else None

    def _update(self) -> None:
        for replica in self._changed:
            key, free_key = self._keys(replica)
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
