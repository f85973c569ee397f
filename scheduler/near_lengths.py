"""Content lengths of a replica's residents, for how far the nearest of them is from another.

Residents grow in every batch and seldom anybody asks, so it is only noted who has grown, and the
lengths are brought up to date when somebody does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from scheduler.sequence import Sequence


class NearLengths:
    """Lengths of some sequences; told of each that comes, may have grown or goes."""

    __slots__ = ("_anew", "_grown", "_grown_count", "_known", "_rising")

    def __init__(self) -> None:
        self._rising: list[int] = []
        """The values of `_known`."""
        self._known: dict[Sequence, int] = {}
        self._grown: list[Iterable[Sequence]] = []
        self._grown_count = 0
        self._anew = False
        """So many have grown that it is cheaper to begin anew."""

    def add(self, sequence: Sequence) -> None:
        self._known[sequence] = sequence.length
        insort(self._rising, sequence.length)

    def grown(self, sequences: list[Sequence]) -> None:
        """These are longer, or some of them, or they have gone meanwhile. O(1)."""
        if not self._anew:
            self._grown.append(sequences)
            self._grown_count += len(sequences)
            self._anew = self._grown_count > len(self._known)

    def remove(self, sequence: Sequence) -> None:
        del self._rising[bisect_left(self._rising, self._known.pop(sequence))]

    def rising(self) -> list[int]:
        """All lengths as they are now."""
        if self._anew:
            self._known = {sequence: sequence.length for sequence in self._known}
            self._rising = sorted(self._known.values())
        else:
            for sequences in self._grown:
                self._update(sequences)
        self._grown.clear()
        self._grown_count, self._anew = 0, False
        return self._rising

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

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that these are the ones and that none has grown unsaid, and changes nothing: who
        asks next will be told of their lengths. O(all of them)."""
        assert set(self._known) == set(sequences), "lengths of others"
        assert self._rising == sorted(self._known.values()), "lengths are out of order"
        if not self._anew:
            grown = {one for some in self._grown for one in some}
            for one, length in self._known.items():
                assert one.length == length or one in grown, f"{one.id} has grown, nobody said so"

    def _update(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            before = self._known.get(sequence)
            if before is not None and before != sequence.length:
                del self._rising[bisect_left(self._rising, before)]
                insort(self._rising, sequence.length)
                self._known[sequence] = sequence.length
