"""A token bucket. Pure: the time is an argument; what a token is, the caller knows."""

from __future__ import annotations


class TokenBucket:
    """Holds one minute's tokens at most, begins full, and fills at a steady rate.

    A request for more than it ever holds passes when it is full and leaves it in debt, so that
    nothing is too large for ever; the debt is paid before anything else is taken.
    """

    def __init__(self, tokens_per_minute: float, now_s: float) -> None:
        self._size = tokens_per_minute
        self._level = tokens_per_minute
        self._filled_s = now_s

    def resize(self, tokens_per_minute: float, now_s: float) -> None:
        """Another rate from now on; what is there stays, as far as it fits."""
        self._fill(now_s)
        self._size = tokens_per_minute
        self._level = min(self._level, self._size)

    def take(self, tokens: float, now_s: float) -> float:
        """0 if taken; else the seconds after which they could be, if nobody else takes any."""
        self._fill(now_s)
        missing = min(tokens, self._size) - self._level
        if missing > 0:
            return missing * 60 / self._size
        self._level -= tokens
        return 0.0

    def give_back(self, tokens: float, now_s: float) -> None:
        """What was taken and not used."""
        self._fill(now_s)
        self._level = min(self._level + tokens, self._size)

    def _fill(self, now_s: float) -> None:
        passed_s = max(now_s - self._filled_s, 0.0)
        self._filled_s = max(now_s, self._filled_s)
        self._level = min(self._level + passed_s * self._size / 60, self._size)
