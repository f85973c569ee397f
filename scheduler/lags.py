"""Who has had fewer steps than an equal share: each row's steps against its replica's rounds.

Of the rows that step on a replica every one is due a step per round; a batch of b of R rows is
b / R of a round. That is the virtual time of fair queueing, and how far a row is behind it is its
lag (Stoica and Abdel-Wahab, Earliest Eligible Virtual Deadline First, 1995). Rounds are counted in
rows and not in batches, so that what nobody could help, a thin group, puts nobody behind.

A bound on each single wait does not see who waits a little longer than the others before every one
of its steps. A long prompt among short ones does: with 64 in flight on two replicas and prompts and
answers of widely mixed length, requests in the slowest hundredth took a third longer than in order
of arrival; with the lag bounded, too, a twentieth less, and the throughput is the same within 0.3 %
(`lockstep simulate --baseline eqspec`). Under such a load most groups are then for a row that is
due, four in five there: a quarter of the rows are two rounds behind, long ones above all, and who
lies near one that is due steps with it.

Knows rows and rounds; nothing of lengths, groups and waits.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

LAG_MAX = 2.0
"""Rounds that a row may be behind before it is due. Anything from 1 to 2.5 does about the same."""

WATCHED = 1.0
"""Rounds that a row has to be behind when it becomes ready to be due this way before it has waited
long; the others are few, and every one that is watched costs."""

LEAD_MAX = 1.0
"""Rounds that a row may be ahead: what it had early is held against it no longer than that."""

_HEAP_SLACK = 16
"""Entries of the heap beyond two for each row."""

Row = TypeVar("Row", bound=Hashable)


class Lags(Generic[Row]):
    """The lags of one replica's rows."""

    __slots__ = ("_behind", "_entries", "_served", "rounds")

    def __init__(self) -> None:
        self.rounds = 0.0
        """Rounds since the replica's first batch."""
        self._served: dict[Row, float] = {}
        """Up to which round each row has had its steps, ready or not."""
        self._behind: list[tuple[float, int, Row]] = []
        """A heap of (served, number, row): watched rows. Who has stepped or left since is dropped
        when it comes to the top."""
        self._entries = 0

    def lag(self, row: Row) -> float:
        """Rounds that the row is behind; negative: ahead."""
        return self.rounds - self._served[row]

    def become_ready(self, rows: Iterable[Row]) -> None:
        """The rows may step now. A new one starts with the round as it is."""
        rounds, served = self.rounds, self._served
        latest = rounds - WATCHED
        for row in rows:
            until = served.setdefault(row, rounds)
            if until <= latest:
                self._entries += 1
                heappush(self._behind, (until, self._entries, row))
        if len(self._behind) > 2 * len(served) + _HEAP_SLACK:
            # Nobody may ask for long who is due: in order of arrival nobody ever does.
            self._behind = [one for one in self._behind if served.get(one[2]) == one[0]]
            heapify(self._behind)

    def step(self, rows: list[Row], of: int) -> None:
        """Ready rows take a step, of so many that step on this replica."""
        self.rounds += len(rows) / of
        served = self._served
        least, most = self.rounds - LAG_MAX, self.rounds + LEAD_MAX
        for row in rows:
            until = served[row] + 1.0
            served[row] = least if until < least else most if until > most else until

    def due(self, ready: Container[Row]) -> Row | None:
        """Of the ready rows that are watched the one furthest behind, if it is due."""
        behind, served = self._behind, self._served
        latest = self.rounds - LAG_MAX
        while behind and behind[0][0] <= latest:
            until, _, row = behind[0]
            # A step moves it, always forward.
            if row in ready and served[row] == until:
                return row
            heappop(behind)
        return None

    def forget(self, row: Row) -> None:
        """The row leaves the replica."""
        self._served.pop(row, None)
        if not self._served:
            self._behind.clear()

    def check_integrity(self, ready: Iterable[Row], residents: Iterable[Row]) -> None:
        """`ready`: ready rows that are free; `residents`: all rows of the replica."""
        assert self._served.keys() >= set(ready), "a ready row without a share"
        assert self._served.keys() <= set(residents), "the share of a row that has left"
        most = self.rounds + LEAD_MAX
        assert all(until <= most for until in self._served.values()), "a row is too far ahead"
        live = [one for one in self._behind if self._served.get(one[2]) == one[0]]
        assert len({row for _, _, row in live}) == len(live), "a row is watched twice"
