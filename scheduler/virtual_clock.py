"""Virtual time: what is to happen, in order of time and then of being planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """Several worlds may share one; it knows nothing of what happens."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, at_s: float, happen: Callable[[], None]) -> None:
        """Plans something; what lies in the past happens next."""
        self._number += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._number, happen))

    def run(self, until_s: float = float("inf")) -> None:
        """Lets everything happen, or what happens until then."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, happen = heapq.heappop(heap)
            happen()
