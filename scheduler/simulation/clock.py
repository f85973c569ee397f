"""Virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """What is planned happens in order of time, and of planning at the same time.

    Several worlds may share one.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def at(self, at_s: float, happen: Callable[[], None]) -> None:
        """Plans a call; one that lies in the past happens next."""
        self._planned += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._planned, happen))

    def after(self, delay_s: float, happen: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, happen)

    def run(self, until_s: float = float("inf")) -> None:
        """Makes all planned calls, or those until a time."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, happen = heapq.heappop(heap)
            happen()
