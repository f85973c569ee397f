"""Rows that may step with fewer others than the rest: whose request, or the config, limits the rows
of their group or how far apart their lengths may be.

Such a row is narrow, the others are free. A group obeys the limits of all its rows. Knows lengths
and limits; nothing of ages and of how a group is chosen, for which see `grouping`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from scheduler.config import SchedulerConfig
from scheduler.messages import Pins

Row = TypeVar("Row")


class Limits(NamedTuple):
    """What the group of a narrow row may be at most."""

    rows_max: int
    spread_max: float = math.inf
    """Longest minus shortest row, in tokens, when a batch begins."""

    def as_wide_as(self, other: Limits) -> bool:
        """Whether a group that obeys the other limits obeys these, too."""
        return self.rows_max >= other.rows_max and self.spread_max >= other.spread_max


def limits_of(pins: Pins, config: SchedulerConfig) -> Limits | None:
    """The narrower of the request's and the config's limits; None for a free row."""
    rows_max = min(pins.rows_max or config.rows_max, config.rows_max)
    spreads = [one for one in (pins.spread_max, config.spread_max) if one is not None]
    if rows_max == config.rows_max and not spreads:
        return None
    return Limits(rows_max, min(spreads, default=math.inf))


def narrow_groups(rows: Iterable[Limits], rows_max: int) -> int:
    """How many batches at most hold all these rows, each batch beginning with the oldest one left
    and its likes: by rows for equal limits of rows alone, else one for each, for lengths differ."""
    groups = 0
    for limits, count in Counter(rows).items():
        together = min(limits.rows_max, rows_max) if limits.spread_max == math.inf else 1
        groups += -(-count // together)
    return groups


def groups_by_length(rows: Iterable[tuple[int, Limits]], rows_max: int) -> int:
    """In how many groups of equal limits these rows have place now, given their lengths. Fewer than
    `narrow_groups` as a rule, but lengths change while a row waits."""
    lengths: dict[Limits, list[int]] = {}
    for length, limits in rows:
        lengths.setdefault(limits, []).append(length)
    groups = 0
    for limits, some in lengths.items():
        shortest, count, together = 0, 0, min(limits.rows_max, rows_max)
        for length in sorted(some):
            if count % together == 0 or length - shortest > limits.spread_max:
                groups, shortest, count = groups + 1, length, 0
            count += 1
    return groups


class Group(Generic[Row]):
    """A group in the making, of rows of any type."""

    def __init__(self, rows_max: int) -> None:
        """`rows_max`: of the replica."""
        self.rows: list[Row] = []
        """In the order in which they were added."""
        self._rows_most = rows_max
        self._spread_most = math.inf
        self._shortest = self._longest = 0

    @property
    def full(self) -> bool:
        return len(self.rows) >= self._rows_most

    def fits(self, length: int, limits: Limits | None) -> bool:
        """Whether a row of this length may join; the first one always may."""
        if not self.rows:
            return True
        rows_most, spread_most = self._rows_most, self._spread_most
        if limits is not None:
            rows_most = min(rows_most, limits.rows_max)
            spread_most = min(spread_most, limits.spread_max)
        spread = max(self._longest, length) - min(self._shortest, length)
        return len(self.rows) < rows_most and spread <= spread_most

    def add(self, row: Row, length: int, limits: Limits | None) -> bool:
        """The row joins if it fits; whether it did."""
        if not self.fits(length, limits):
            return False
        self._shortest = min(self._shortest, length) if self.rows else length
        self._longest = max(self._longest, length)
        if limits is not None:
            self._rows_most = min(self._rows_most, limits.rows_max)
            self._spread_most = min(self._spread_most, limits.spread_max)
        self.rows.append(row)
        return True
