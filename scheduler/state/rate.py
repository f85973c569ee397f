"""Tokens per second over the last seconds, without a clock: the time is an argument."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10


class RateMeter:
    """Counts in slots of one second; what is older than WINDOW_S is forgotten."""

    def __init__(self) -> None:
        self._slots: deque[list[int]] = deque()
        """[second, tokens], rising."""
        self._sum = 0
        self._began_s = 0.0

    def add(self, tokens: int, now_s: float) -> None:
        second = int(now_s)
        self._drop(second)
        if not self._slots:  # the first ever, or after a pause
            self._began_s = now_s
        self._sum += tokens
        if self._slots and self._slots[-1][0] == second:
            self._slots[-1][1] += tokens
        else:
            self._slots.append([second, tokens])

    def per_s(self, now_s: float) -> float:
        """0 before the first token and after WINDOW_S without one."""
        self._drop(int(now_s))
        if not self._slots:
            return 0.0
        # In the first seconds the window is not full; a second is the least that means anything.
        span_s = min(max(now_s - self._began_s, 1.0), float(WINDOW_S))
        return self._sum / span_s

    def _drop(self, second: int) -> None:
        while self._slots and self._slots[0][0] <= second - WINDOW_S:
            self._sum -= self._slots.popleft()[1]
