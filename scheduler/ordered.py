"""Keys in rising order, in chunks, so that adding or removing one moves few others.

A plain sorted list moves all keys behind the one that goes: at 100,000 that is most of the work.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

CHUNK = 512
"""Keys of a chunk that was filled from its end; one that grows beyond twice as many is halved."""

Key = tuple[float, int, str]


class Ordered:
    """Distinct keys; O(log n) comparisons for each that is added or removed."""

    def __init__(self) -> None:
        self._chunks: list[list[Key]] = []
        """None of them is empty."""
        self._lasts: list[Key] = []
        """The last key of each chunk."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Key]:
        """Rising; nothing may be added or removed meanwhile."""
        for chunk in self._chunks:
            yield from chunk

    def add(self, key: Key) -> None:
        self._count += 1
        lasts = self._lasts
        if not lasts or key > lasts[-1]:
            if lasts and len(self._chunks[-1]) < CHUNK:
                self._chunks[-1].append(key)
                lasts[-1] = key
            else:
                self._chunks.append([key])
                lasts.append(key)
            return
        index = bisect_left(lasts, key)
        chunk = self._chunks[index]
        insort(chunk, key)
        if len(chunk) > 2 * CHUNK:
            self._chunks[index : index + 1] = [chunk[:CHUNK], chunk[CHUNK:]]
            lasts.insert(index, chunk[CHUNK - 1])

    def remove(self, key: Key) -> None:
        """The key must be there."""
        index = bisect_left(self._lasts, key)
        chunk = self._chunks[index] if index < len(self._chunks) else []
        at = bisect_left(chunk, key)
        assert chunk[at : at + 1] == [key], f"{key[2]} is not there"
        self._count -= 1
        del chunk[at]
        if not chunk:
            del self._chunks[index], self._lasts[index]
        elif at == len(chunk):
            self._lasts[index] = chunk[-1]
