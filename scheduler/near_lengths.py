"""Content lengths of a replica's residents, for how far the nearest of them is from another.

Residents grow in every order and seldom anybody asks, so growth is only noted, once per resident,
and applied when somebody does.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from scheduler.sequence import Sequence


class NearLengths:
    """Lengths of some sequences; told of each that comes, has grown or goes."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        """Rising; of those in `_grown` it has the length from before."""
        self._grown: dict[Sequence, int] = {}

    def add(self, sequence: Sequence) -> None:
        insort(self._lengths, sequence.length)

    def grown(self, sequence: Sequence, before: int) -> None:
        """Its length was `before`. O(1)."""
        self._grown.setdefault(sequence, before)

    def remove(self, sequence: Sequence) -> None:
        length = self._grown.pop(sequence, sequence.length)
        del self._lengths[bisect_left(self._lengths, length)]

    def rising(self) -> list[int]:
        """All lengths as they are now."""
        lengths = self._lengths
        for sequence, before in self._grown.items():
            del lengths[bisect_left(lengths, before)]
            insort(lengths, sequence.length)
        self._grown.clear()
        return lengths

    def distance(self, length: int) -> int:
        """How far the nearest length is; 0 without any."""
        lengths = self.rising()
        if not lengths:
            return 0
        at = bisect_left(lengths, length)
        if at == len(lengths):
            return length - lengths[-1]
        above = lengths[at] - length
        return min(length - lengths[at - 1], above) if at else above
