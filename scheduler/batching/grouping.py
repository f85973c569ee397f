"""Which rows step together: rows of near length, with a bounded wait.

A batch reads its KV cache as far as its longest row, so rows of one length cost least. A row is
passed over whenever a batch of steps is dispatched on its replica while the row is ready and not in
it. Let G = ceil(R / rows_max) be the least number of batches that hold the R rows that step on a
replica (ready or in a batch), and w the config's `wait_rounds`.

1. A row is behind that was passed over (w - 1.5) * G times; or else one that has committed nothing
   yet, for somebody waits for its first token; or else one that has had LAG steps fewer than its
   equal share: who always waits a little longer than the others ends much later. Around the row
   that is furthest behind the tightest window is chosen: of the windows of rows_max lengths that
   contain it, the one of least spread. Where no row is behind, it is the window of the shortest
   rows: who is behind in length catches up with the next ones and then goes on with them.
2. A row is due once it was passed over (w - 1) * G times. Due rows come first, the oldest before
   the others, and the window fills what is left of the batch.

The bound: no row is passed over more than w * G - 1 times in a row, G taken at its largest during
the wait. Rows that became ready after a row s were passed over no more often than s. Once s is due,
all that are older are, too, and every batch takes the rows_max oldest of them; s and those before
it are at most R rows, so s is in one of the next G batches, and is passed over at most G - 1 times
more. So no row waits for more than w rounds, a round being G batches. With w = 1 rows go in the
order in which they became ready, as in EQSPEC without grouping (arXiv 2510.22876).

Knows lengths and ages; a row itself is any object that a dict takes as a key.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice, takewhile
from typing import Generic, TypeVar

Row = TypeVar("Row", bound=Hashable)

LAG = 2.0
"""Steps."""
_SLACK = 64


def groups_needed(rows: int, rows_max: int) -> int:
    """G: the least number of batches that hold all rows."""
    return -(-rows // rows_max)


def passes_bound(rows: int, rows_max: int, wait_rounds: int) -> int:
    """How often at most a ready row is passed over in a row, with `rows` rows on its replica."""
    return max(wait_rounds * groups_needed(rows, rows_max) - 1, 0)


def may_step(
    ready: int, stepping: int, joining: int, batches_in_flight: int, rows_max: int
) -> bool:
    """Whether a batch of steps is worth dispatching now, or should wait for rows in flight.

    A replica without any batch never waits. Beside a batch of steps a full one goes, and beside a
    full one also half of one: with no more rows than one batch holds all go together, for two
    fragments would take turns for ever and never merge. Behind a prefill alone, half of the batch
    that it will be part of is enough: the rows being filled join one step later, and the replica
    has no gap.
    """
    if ready == 0:
        return False
    if batches_in_flight == 0:
        return True
    if stepping:
        return ready >= rows_max or (stepping >= rows_max and 2 * ready >= rows_max)
    return 2 * ready >= min(ready + joining, rows_max)


class ReadyRows(Generic[Row]):
    """The ready rows of one replica: by length, by age, and by the steps that they have had.

    Time is counted in steps of an equal share: a batch is worth its rows over all that step. A
    row's turn is that time when it came, and one more for each step that it has had.
    """

    __slots__ = (
        "_by_age",
        "_by_turn",
        "_new",
        "_number",
        "_rising",
        "_share",
        "_turns",
        "batches",
    )

    def __init__(self) -> None:
        self._by_age: dict[Row, tuple[int, int, int]] = {}
        """(length, number, batches dispatched before) of a row when it became ready, oldest
        first."""
        self._rising: list[tuple[int, int, Row]] = []
        """(length, number, row); of one length the oldest first."""
        self._new: dict[Row, None] = {}
        """Rows whose first token somebody waits for, the oldest first."""
        self._by_turn: list[tuple[float, int, Row]] = []
        """A heap of (turn, number, row), with some that are ready no more."""
        self._turns: dict[Row, float] = {}
        """Of all rows, in batches as well."""
        self._share = 0.0
        self._number = 0
        self.batches = 0
        """Batches of steps dispatched on this replica."""

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, row: object) -> bool:
        return row in self._by_age

    def __iter__(self) -> Iterator[Row]:
        """The oldest first."""
        return iter(self._by_age)

    def lengths(self) -> list[int]:
        """Lengths of all ready rows, rising."""
        return [length for length, _, _ in self._rising]

    def add(self, row: Row, length: int, new: bool = False) -> None:
        """The row is ready, from now on the youngest. O(log n) comparisons."""
        self._number += 1
        self._by_age[row] = (length, self._number, self.batches)
        insort(self._rising, (length, self._number, row))
        heappush(self._by_turn, (self._turns.setdefault(row, self._share), self._number, row))
        if len(self._by_turn) > 2 * len(self._by_age) + _SLACK:
            self._by_turn = [one for one in self._by_turn if self._is_current(one)]
            heapify(self._by_turn)
        if new:
            self._new[row] = None

    def remove(self, row: Row) -> None:
        """It is not ready any more, though it may be again."""
        length, number, _ = self._by_age.pop(row)
        del self._rising[self._place(length, number)]
        self._new.pop(row, None)

    def forget(self, row: Row) -> None:
        """It has left the replica."""
        self._turns.pop(row, None)

    def passes(self, row: Row) -> int:
        """How often the row was passed over since it became ready."""
        return self.batches - self._by_age[row][2]

    def is_due(self, wait_rounds: int, groups: int) -> bool:
        """Whether rule 2 takes the oldest row."""
        return self.passes(next(iter(self._by_age))) >= (wait_rounds - 1) * groups

    def choose(self, rows_max: int, groups: int, wait_rounds: int) -> list[Row]:
        """The rows of the next batch, shortest first; nothing is changed. `groups` is G. Needs at
        least one ready row."""
        size = min(rows_max, len(self))
        behind = self._behind(wait_rounds, groups)
        begin = 0 if behind is None else self._tightest(behind, size)
        window = [row for _, _, row in self._rising[begin : begin + size]]
        if not self.is_due(wait_rounds, groups):
            return window
        assert behind is not None
        length = self._by_age[behind][0]
        due = takewhile(lambda row: self.passes(row) >= (wait_rounds - 1) * groups, self._by_age)
        nearest = sorted(window, key=lambda row: abs(self._by_age[row][0] - length))
        chosen = dict.fromkeys([*islice(due, size), *nearest])
        return sorted(islice(chosen, size), key=self._by_age.__getitem__)

    def anchor_of(self, rows: Iterable[Row], wait_rounds: int, groups: int) -> Row:
        """Of rows that were chosen just now the one that they are for, or else the oldest."""
        some = set(rows)
        behind = self._behind(wait_rounds, groups)
        if behind is not None and behind in some:
            return behind
        return next(row for row in self._by_age if row in some)

    def take(self, rows: Sequence[Row], of: int) -> None:
        """Removes the rows of a batch that is dispatched: it passes the others over. `of`: all rows
        that step on the replica."""
        self.batches += 1
        self._share += len(rows) / of
        for row in rows:
            self.remove(row)
            self._turns[row] += 1.0

    def check_integrity(self) -> None:
        """Asserts that both orders hold the same rows."""
        rising = [(length, number, row) for row, (length, number, _) in self._by_age.items()]
        assert sorted(rising) == self._rising, "ready rows differ, or are out of order"
        assert self._new.keys() <= self._by_age.keys(), "a row that is not there is new"
        turns = {(self._turns[row], number, row) for _, number, row in rising}
        assert turns == set(filter(self._is_current, self._by_turn)), "turns of ready rows"
        ages = [(number, batches) for _, number, batches in self._by_age.values()]
        assert ages == sorted(ages), "ready rows are not in order of age"

    def _behind(self, wait_rounds: int, groups: int) -> Row | None:
        """Whom rule 1 is for."""
        oldest = next(iter(self._by_age))
        if 2 * self.passes(oldest) >= (2 * wait_rounds - 3) * groups:
            return oldest
        if self._new:
            return next(iter(self._new))
        while not self._is_current(self._by_turn[0]):
            heappop(self._by_turn)
        turn, _, row = self._by_turn[0]
        return row if self._share - turn >= LAG else None

    def _tightest(self, row: Row, size: int) -> int:
        """Where the window of least spread begins that contains the row; of several the longest."""
        rising = self._rising
        at = self._place(*self._by_age[row][:2])
        begins = range(max(at - size + 1, 0), min(at, len(rising) - size) + 1)
        return min(begins, key=lambda one: (rising[one + size - 1][0] - rising[one][0], -one))

    def _place(self, length: int, number: int) -> int:
        # A shorter tuple stands before all that begin with it.
        return bisect_left(self._rising, (length, number))

    def _is_current(self, entry: tuple[float, int, Row]) -> bool:
        """Whether the row is ready, and has been since this entry was made."""
        known = self._by_age.get(entry[2])
        return known is not None and known[1] == entry[1]
