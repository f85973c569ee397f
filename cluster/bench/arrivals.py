"""When requests are sent, from one event loop. Times are seconds since the load began.

*Closed loop*: so many requests in flight; the next is sent when one ends, so a slow server is asked
less. *Open loop* (Poisson): the times are drawn before, whatever the server does, and a latency
counts from the intended arrival: a request that had to wait because the driver or the server was
late has waited, and is not left out of the figures (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from cluster.bench.figures import Record
from scheduler.simulation import poisson

Send = Callable[[int, Record, Callable[[], float]], Awaitable[None]]
"""Sends the request of this number, and notes in the record what comes and when, by the clock that
it is given; a failure too."""


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
    """How much is sent: the first bound that is reached ends the load; running requests end.

    One of the two is needed.
    """

    requests: int | None = None
    duration_s: float | None = None

    def ended(self, sent: int, now_s: float) -> bool:
        """Whether a request that would be sent now is beyond it."""
        if self.requests is not None and sent >= self.requests:
            return True
        return self.duration_s is not None and now_s >= self.duration_s


async def drive(
    send: Send,
    arrivals: Arrivals,
    extent: Extent,
    note: Callable[[int], None] = lambda ended: None,
) -> list[Record]:
    """Send the requests 0, 1, ... and wait until all have ended; `note` hears how many have.

    A request that fails is noted with its status code; the load goes on. What `send` raises ends
    it, and is raised here.
    """
    begun_s = time.perf_counter()

    def now_s() -> float:
        return time.perf_counter() - begun_s

    records: list[Record] = []
    ended = 0

    async def one(due_s: float | None) -> None:
        nonlocal ended
        number = len(records)
        sent_s = now_s()
        record = Record(number, sent_s if due_s is None else due_s, sent_s)
        records.append(record)
        await send(number, record, now_s)
        record.end_s = now_s()
        ended += 1
        note(ended)

    try:
        async with asyncio.TaskGroup() as group:
            if isinstance(arrivals, Closed):

                async def place() -> None:
                    while not extent.ended(len(records), now_s()):
                        await one(None)

                for _ in range(arrivals.in_flight):
                    group.create_task(place())
            else:
                for sent, due_s in enumerate(arrivals.due_s()):
                    if extent.ended(sent, due_s):
                        break
                    await asyncio.sleep(max(due_s - now_s(), 0.0))
                    group.create_task(one(due_s))
    except ExceptionGroup as raised:
        raise raised.exceptions[0] from None
    return records
