"""Ready rows by length, and the tightest window of them: what a group is taken from.

Knows lengths; who has to be in a window is said from outside, see `grouping`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterable
from operator import sub
from typing import Generic, TypeVar

LEVEL = 0.4
"""Share of an even window's spread up to which a window is tight. Tried from 0.2 to 1."""

TIES_MAX = 16
"""Windows of equal spread that are compared by age; the leftmost ones, to bound the work."""

SCAN = 32
"""Windows whose spreads are worked out at once where the first tight one is sought."""

Row = TypeVar("Row", bound=Hashable)


class Shelf(Generic[Row]):
    """Rows by length; of one length the oldest first.

    A batch looks at dozens of lengths and takes few rows. So lengths stand beside each other as
    plain numbers: nothing of a row that is not taken is fetched from memory.
    """

    __slots__ = ("lengths", "rows")

    def __init__(self, lengths: Iterable[int] = (), rows: Iterable[Row] = ()) -> None:
        self.lengths = array("i", lengths)
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, row: Row, length: int) -> int:
        """Where the row stands."""
        return self.rows.index(row, bisect_left(self.lengths, length))

    def remove(self, row: Row, length: int) -> None:
        at = self.find(row, length)
        del self.rows[at], self.lengths[at]

    def remove_window(self, rows: list[Row], length: int) -> bool:
        """Removes rows of which the first is here, with this length, if they stand side by side;
        else nothing is changed."""
        first = self.find(rows[0], length)
        last = first + len(rows)
        if self.rows[first:last] != rows:
            return False
        del self.rows[first:last], self.lengths[first:last]
        return True

    def window(self, size: int, anchor: tuple[Row, int] | None, ages: Iterable[Row]) -> list[Row]:
        """With an anchor (row, length) the tightest window that holds it, else that of rule 1.

        `ages`: all ready rows, the oldest first.
        """
        lengths = self.lengths
        size = min(size, len(lengths))
        first, last = 0, len(lengths) - size
        if anchor is not None:
            at = self.find(*anchor)
            first, last = max(first, at - size + 1), min(last, at)
        else:
            tight = LEVEL * (lengths[-1] - lengths[0]) * size / len(lengths)
            # One of the shortest, nearly always, so most windows are never looked at.
            for begin in range(0, last + 1, SCAN):
                spreads = self._spreads(begin, min(begin + SCAN, last + 1), size)
                if min(spreads) <= tight:
                    start = begin + next(at for at, one in enumerate(spreads) if one <= tight)
                    return self.rows[start : start + size]
        spreads = self._spreads(first, last + 1, size)
        least = min(spreads)
        start = first + spreads.index(least)
        if spreads.count(least) > 1:
            if anchor is None:
                start = self._oldest_of(spreads, least, size, ages)
            else:
                # The longest: rule 1 is for the shortest.
                start = last - spreads[::-1].index(least)
        return self.rows[start : start + size]

    def _spreads(self, begin: int, end: int, size: int) -> list[int]:
        """Of the windows that start from `begin` up to `end`."""
        lengths = self.lengths
        return list(map(sub, lengths[begin + size - 1 : end + size - 1], lengths[begin:end]))

    def _oldest_of(self, spreads: list[int], least: int, size: int, ages: Iterable[Row]) -> int:
        """Start of the window with the oldest row, of those of least spread."""
        start = -1
        starts: dict[Row, int] = {}
        for _ in range(TIES_MAX):
            try:
                start = spreads.index(least, start + 1)
            except ValueError:
                break
            for row in self.rows[start : start + size]:
                starts.setdefault(row, start)
        return next(starts[row] for row in ages if row in starts)
