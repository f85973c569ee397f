"""Sums of metrics in one process, which travel to another and are added there.

A frontend's counts go to its pool with its beats, so that any frontend can tell what all of them
have counted, and a counter that is scraped through a load balancer never falls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from operator import add

from cluster.metrics.table import METRICS
from scheduler.messages import Message

Sink = Callable[[str, float, Mapping[str, str]], None]
"""Takes (name, value, tags): adds to a counter, sets a gauge, observes in a histogram."""


class Sum(Message, frozen=True):
    """One metric with one set of tags."""

    name: str
    tags: tuple[str, ...]
    """Values, in the table's order."""
    value: float
    """Of a counter what was added, of a gauge what it is, of a histogram what was observed in
    all."""
    buckets: tuple[int, ...] = ()
    """Of a histogram: observations by bucket; the last one is of those above all bounds."""


class Sums:
    """Adds up; `add` is a `Sink`."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._buckets: dict[tuple[str, tuple[str, ...]], list[int]] = {}

    def add(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        metric = METRICS[name]
        key = name, tuple(tags.values())
        if metric.kind == "Gauge":
            self._values[key] = value
            return
        self._values[key] = self._values.get(key, 0.0) + value
        if metric.kind == "Histogram":
            self._buckets_of(key)[bisect_left(metric.bounds, value)] += 1

    def merge(self, sums: Iterable[Sum]) -> None:
        for each in sums:
            key = each.name, each.tags
            self._values[key] = self._values.get(key, 0.0) + each.value
            if each.buckets:
                ours = self._buckets_of(key)
                ours[:] = map(add, ours, each.buckets)

    def all(self) -> list[Sum]:
        return [
            Sum(*key, value, tuple(self._buckets.get(key, ())))
            for key, value in self._values.items()
        ]

    def take(self) -> list[Sum]:
        """All since the last time."""
        taken = self.all()
        self._values.clear()
        self._buckets.clear()
        return taken

    def _buckets_of(self, key: tuple[str, tuple[str, ...]]) -> list[int]:
        if key not in self._buckets:
            self._buckets[key] = [0] * (len(METRICS[key[0]].bounds) + 1)
        return self._buckets[key]
