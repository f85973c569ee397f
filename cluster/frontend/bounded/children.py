"""Child processes for one job, and the work that waits for them.

A tenant has one piece of work with the children at a time, so that its costly work leaves a child
to others. Tenants take turns. Belongs to no event loop while no work waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from cluster.frontend.bounded.process import Bounds, Child, ChildDied, TooBusy
from scheduler.errors import LockstepError, Overloaded

_CHILDREN = 2
"""Of each job; the second one starts once two tenants have work at the same time."""
_TRIES = 2

_T = TypeVar("_T")
Run = Callable[[bytes], Coroutine[Any, Any, bytes]]
"""Asks a child, and returns its result."""

_log = logging.getLogger("lockstep.frontend")


class ChildrenFailed(LockstepError):
    """Children end without a fault of their work, or do not start."""


class ChildrenClosed(LockstepError):
    """The server stops."""


class _Place:
    """Where one child runs. Another one takes its place once it has ended."""

    def __init__(self, start: Callable[[Bounds], Child], bounds: Bounds) -> None:
        self._start, self._bounds = start, bounds
        self.running: Child | None = None

    def child(self) -> Child:
        """Raises OSError where it cannot be started."""
        if self.running is None or not self.running.alive:
            self.running = self._start(self._bounds)
        return self.running


class Children:
    """Some processes for one job."""

    def __init__(self, start: Callable[[Bounds], Child], bounds: Bounds, waiting_max: int) -> None:
        """`start` makes a child. `waiting_max`: pieces of work that may wait."""
        self._bounds, self._waiting_max = bounds, waiting_max
        self._places = [_Place(start, bounds) for _ in range(_CHILDREN)]
        self._idle = list(self._places)
        """The last is taken first, so one that has run is."""
        self._busy: set[str] = set()
        """Tenants with a piece of work under way."""
        self._waiting: dict[str, deque[asyncio.Future[_Place]]] = {}
        """By tenant; the first one has waited longest for its turn."""
        self._at_work: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self) -> None:
        """Starts one child in advance, and does not wait for it. Raises OSError."""
        self._places[-1].child()

    def close(self) -> None:
        """Ends all children, and all work by ChildrenClosed."""
        self._closed = True
        for place in self._places:
            if place.running is not None:
                place.running.kill()

    @property
    def pids(self) -> list[int]:
        """Of the children that run."""
        running = [place.running for place in self._places]
        return [child.pid for child in running if child is not None and child.alive]

    async def at_turn(self, tenant: str, work: Callable[[Run], Coroutine[Any, Any, _T]]) -> _T:
        """What `work` returns, which begins when the tenant has its turn, and has a child do things
        then. A cancel ends the wait; work that has begun goes on, since to end a child costs more.

        Raises what `work` raises, Overloaded, and by its `Run` WorkRefused, ChildrenFailed and
        ChildrenClosed.
        """
        place = await self._turn(tenant)
        task = asyncio.create_task(self._turn_of(tenant, place, work))
        self._at_work.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def _turn_of(
        self, tenant: str, place: _Place, work: Callable[[Run], Coroutine[Any, Any, _T]]
    ) -> _T:
        try:
            return await work(partial(self._run, place))
        except TooBusy:
            raise _too_busy() from None
        finally:
            self._turn_over(tenant, place)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._at_work.discard(task)
        if not task.cancelled():
            task.exception()  # Its call may have gone; this says that somebody has looked at it.

    async def _run(self, place: _Place, asked: bytes) -> bytes:
        """A child that ends without a fault of the work is replaced, and asked once more."""
        for _ in range(_TRIES):
            try:
                return await self._child(place).do(asked)
            except (ChildDied, OSError) as error:
                _log.error("a process for bounded work ended: %s", error)
        raise _failed()

    def run_now(self, asked: bytes) -> bytes:
        """For a caller that has no event loop, and one piece of work at a time."""
        for _ in range(_TRIES):
            try:
                return self._child(self._places[-1]).do_now(asked)
            except (ChildDied, OSError) as error:
                _log.error("a process for bounded work ended: %s", error)
            except TooBusy:
                raise _too_busy() from None
        raise _failed()

    def _start_again(self, place: _Place) -> None:
        """The next piece of work is not to wait until another child has loaded."""
        try:
            place.child()
        except OSError as error:
            _log.error("a process for bounded work does not start: %s", error)

    def _child(self, place: _Place) -> Child:
        if self._closed:
            raise ChildrenClosed("the server is stopping")
        return place.child()

    async def _turn(self, tenant: str) -> _Place:
        """Waits for one. Raises Overloaded."""
        if self._idle and tenant not in self._busy:
            self._busy.add(tenant)
            return self._idle.pop()
        if sum(map(len, self._waiting.values())) >= self._waiting_max:
            raise _too_busy()
        turn: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            async with asyncio.timeout(self._bounds.wall_s):
                return await turn
        except BaseException as error:
            if turn in self._waiting.get(tenant, ()):
                self._waiting[tenant].remove(turn)
                self._give_turns()
            elif not turn.cancelled():
                self._turn_over(tenant, turn.result())
            if isinstance(error, TimeoutError):
                raise _too_busy() from None
            raise

    def _turn_over(self, tenant: str, place: _Place) -> None:
        if place.running is not None and not self._closed:
            self._start_again(place)
        self._busy.discard(tenant)
        self._idle.append(place)
        self._give_turns()

    def _give_turns(self) -> None:
        for tenant in [*self._waiting]:
            if not self._idle:
                return
            if tenant in self._busy:
                continue
            turns = self._waiting.pop(tenant)
            while turns and turns[0].done():  # Cancelled, and its waiter does not know it yet.
                turns.popleft()
            if not turns:
                continue
            self._busy.add(tenant)
            turns.popleft().set_result(self._idle.pop())
            if turns:
                self._waiting[tenant] = turns


def _failed() -> ChildrenFailed:
    return ChildrenFailed("the server's processes for this work do not run; its log says why")


def _too_busy() -> Overloaded:
    return Overloaded("this server is too busy to look at the request")
