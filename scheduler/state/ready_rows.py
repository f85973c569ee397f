"""The ready rows of one replica: by length, by age, and by the steps that they have had.

An index, not a policy: which rows step next is decided by `batching.grouping`. Knows lengths and
ages; a row itself is any object that a dict takes as a key.

Time is counted in steps of an equal share: a batch is worth its rows over all that step. A row's
turn is that time when it came, and one more for each step that it has had; its lag is by how much
the time is ahead of its turn. A row that has committed nothing yet is behind all others, for a
client waits for its first token.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from math import inf
from typing import Generic, TypeVar

Row = TypeVar("Row", bound=Hashable)


class ReadyRows(Generic[Row]):
    """Rows that a batch may take. Needs at least one row where a method names a first or a most."""

    def __init__(self) -> None:
        self._by_age: dict[Row, tuple[int, int, int]] = {}
        """(length, number, batches dispatched before) as it became ready; the oldest first."""
        self._rising: list[tuple[int, int, Row]] = []
        """(length, number, row); of one length the oldest first."""
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

    def length(self, row: Row) -> int:
        return self._by_age[row][0]

    def passes(self, row: Row) -> int:
        """How often the row was passed over since it became ready."""
        return self.batches - self._by_age[row][2]

    def oldest(self) -> Row:
        return next(iter(self._by_age))

    def most_behind(self) -> tuple[float, Row]:
        """The largest lag [steps], and its row; of several the oldest."""
        row = min(self._by_age, key=self._turns.__getitem__)
        return self._share - self._turns[row], row

    def shortest(self, size: int) -> list[Row]:
        """So many of the shortest rows, shortest first."""
        return [row for _, _, row in self._rising[:size]]

    def tightest(self, row: Row, size: int) -> list[Row]:
        """Of the windows of `size` lengths that contain the row the one of least spread; of several
        the one of the longest rows. Shortest first."""
        rising = self._rising
        at = self._place(*self._by_age[row][:2])
        begins = range(max(at - size + 1, 0), min(at, len(rising) - size) + 1)
        begin = min(begins, key=lambda one: (rising[one + size - 1][0] - rising[one][0], -one))
        return [row for _, _, row in rising[begin : begin + size]]

    def by_length(self, rows: Sequence[Row]) -> list[Row]:
        """These ready rows, shortest first."""
        return sorted(rows, key=self._by_age.__getitem__)

    def add(self, row: Row, length: int, new: bool = False) -> None:
        """The row is ready, from now on the youngest. O(log n) comparisons."""
        self._number += 1
        self._by_age[row] = (length, self._number, self.batches)
        insort(self._rising, (length, self._number, row))
        self._turns[row] = -inf if new else self._turns.get(row, self._share)

    def remove(self, row: Row) -> None:
        """It is not ready any more, though it may be again."""
        length, number, _ = self._by_age.pop(row)
        del self._rising[self._place(length, number)]

    def forget(self, row: Row) -> None:
        """It has left the replica."""
        self._turns.pop(row, None)

    def take(self, rows: Sequence[Row], of: int) -> None:
        """Removes the rows of a batch that is dispatched: it passes the others over. `of`: all rows
        that step on the replica."""
        self.batches += 1
        self._share += len(rows) / of
        for row in rows:
            self.remove(row)
            turn = self._turns[row]
            self._turns[row] = (self._share if turn == -inf else turn) + 1.0

    def check_integrity(self) -> None:
        """Asserts that both orders hold the same rows."""
        rising = [(length, number, row) for row, (length, number, _) in self._by_age.items()]
        assert sorted(rising) == self._rising, "ready rows differ, or are out of order"
        assert self._by_age.keys() <= self._turns.keys(), "turns of ready rows"
        ages = [(number, batches) for _, number, batches in self._by_age.values()]
        assert ages == sorted(ages), "ready rows are not in order of age"

    def _place(self, length: int, number: int) -> int:
        # A shorter tuple stands before all that begin with it.
        return bisect_left(self._rising, (length, number))
