"""When requests are sent. Knows no clock: times are seconds since the load began.

*Closed loop*: so many requests in flight; the next is sent when one ends, so a slow server is asked
less. *Open loop* (Poisson): the times are drawn before, whatever the server does, and a latency
counts from the intended arrival: a request that had to wait because the driver or the server was
late has waited, and is not left out of the figures (no coordinated omission).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scheduler.simulation import poisson

Note = Callable[[int], None]
"""Called with how many requests have ended."""


@dataclass(frozen=True)
class Closed:
    """A fixed number of requests in flight, at least 1."""

    in_flight: int

    def __str__(self) -> str:
        return f"closed loop, {self.in_flight} in flight"


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals, `rate_per_s` on average."""

    rate_per_s: float
    seed: int = 0

    def __str__(self) -> str:
        return f"open loop, Poisson, {self.rate_per_s:g} requests/s"

    def due_s(self) -> Iterator[float]:
        """Arrivals, rising, without end."""
        return poisson(self.rate_per_s, random.Random(self.seed))


Arrivals = Closed | Poisson


@dataclass(frozen=True)
class Extent:
    """How much is sent: the first bound that is reached ends the load; running requests end."""

    requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.requests is None and self.duration_s is None:
            raise ValueError("requests, duration_s: one of them is needed")

    def ended(self, sent: int, now_s: float) -> bool:
        """Whether a request that would be sent now is beyond it."""
        if self.requests is not None and sent >= self.requests:
            return True
        return self.duration_s is not None and now_s >= self.duration_s
