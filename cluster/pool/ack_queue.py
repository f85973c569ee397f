"""Items for one remote reader that fetches them by long polls. Pure asyncio.

An item stays until a later poll acknowledges its number, so a reply that is lost on its way loses
nothing. A newer poll makes an older one that still waits return empty: the reader has moved on. But
if what came with the newer one is about to be returned by the older one, the newer one waits for
what comes later: a reader that says something and gets its answer then has one poll for each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class AckQueue(Generic[T]):
    """Numbers items from 1. One event loop, no threads.

    `gather_s`: how long an item that is not urgent may wait for others before a poll returns.
    """

    def __init__(self, gather_s: float = 0.0) -> None:
        self._gather_s = gather_s
        self._items: deque[T] = deque()
        self._first = 1
        """Number of the oldest item kept."""
        self._urgent = False
        self._delivered = 0
        """Number of the newest item that a poll has returned."""
        self._waiter: asyncio.Future[bool] | None = None
        self._returning: asyncio.Future[bool] | None = None
        """Of a poll that waited and is about to return with all items."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def last(self) -> int:
        """Number of the newest item; 0 before the first."""
        return self._first + len(self._items) - 1

    @property
    def polled(self) -> bool:
        """Whether a poll waits now."""
        return self._waiter is not None

    @property
    def kept(self) -> tuple[T, ...]:
        """All items that nobody has acknowledged, oldest first."""
        return tuple(self._items)

    def put(self, item: T, urgent: bool = True) -> None:
        """Add an item. Nobody is woken before `settle`, so that several go out together."""
        self._items.append(item)
        self._urgent |= urgent

    def settle(self) -> None:
        """All items of this moment are there: let the waiting poll return when it is time."""
        if self._waiter is None or self.last <= self._delivered:
            return
        if self._urgent or self._gather_s <= 0:
            self._resolve(True)
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._gather_s, self._resolve, True)

    def close(self) -> None:
        """Let the waiting poll return empty."""
        self._resolve(False)

    async def poll(self, acknowledged: int, wait_s: float) -> tuple[int, list[T]]:
        """(number of the first item, items) after those acknowledged; waits for one if need be.

        A poll that follows a lost reply returns the items of that reply again, so the reader skips
        what it has seen.
        """
        while self._items and self._first <= acknowledged:
            self._items.popleft()
            self._first += 1
        self._resolve(False)
        again = bool(self._items) and self._first <= self._delivered
        if self._returning is not None:
            if wait_s <= 0 or not await self._wait(wait_s):
                return self._first, []
        elif wait_s > 0 and not (again or (self._items and self._urgent)):
            patience_s = min(wait_s, self._gather_s) if self._items else wait_s
            if patience_s > 0 and not await self._wait(patience_s):
                return self._first, []
        self._delivered = self.last
        self._urgent = False
        return self._first, list(self._items)

    async def _wait(self, wait_s: float) -> bool:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        timer = loop.call_later(wait_s, _set, waiter, True)
        try:
            return await waiter
        except asyncio.CancelledError:
            if self._returning is waiter:
                # It was to return the items; now a newer poll does, if one waits.
                self._returning = None
                self.settle()
            raise
        finally:
            timer.cancel()
            if self._returning is waiter:
                self._returning = None
            if self._waiter is waiter:
                self._resolve(False)

    def _resolve(self, newest: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            if newest and not waiter.done():
                self._returning = waiter
            _set(waiter, newest)


def _set(waiter: asyncio.Future[bool], value: bool) -> None:
    if not waiter.done():
        waiter.set_result(value)
