"""A frontend's side of all shards: chooses one for each request, and looks at them as one pool.

Each shard has a `PoolSession` of its own, which knows nothing of the others. What is handed to a
shard stays there, unless it does not answer, or has no replica that can hold it, while another one
has.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from cluster.config import ClusterConfig
from cluster.frontend.pool_session.in_flight import InFlightRequest
from cluster.frontend.pool_session.session import PoolSession
from cluster.metrics import FrontendMeter
from cluster.pool.protocol import (
    STOPPING,
    PoolOverview,
    PoolPort,
    PoolUnreachable,
    PoolView,
    merged_view,
)
from cluster.transport import NotEncodable, encode
from scheduler.errors import InvalidRequest
from scheduler.messages import FailureRecord, Request
from scheduler.scaling import ShardLoad, choose_shard

log = logging.getLogger("lockstep.frontend")

_T = TypeVar("_T")
_LOOKS = 4
"""How often, within the time that stranded requests may wait, they are looked for."""
_STATUS_S = 2.0
"""How long the status of several shards waits for one of them."""


class ShardRouter:
    """All requests of one frontend process. One event loop calls it."""

    def __init__(
        self,
        pools: Sequence[PoolPort],
        config: ClusterConfig,
        name: str,
        meter: FrontendMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pools`: one per shard; `name` of this frontend."""
        meter = meter or FrontendMeter()
        self.pools = pools
        self._names = config.pool_names
        self._move_s = config.pool.move_s
        self._unreachable_s = config.pool.unreachable_s
        self._clock = clock
        self.sessions = [
            PoolSession(
                pool,
                config.pool,
                f"{name}.{shard}" if shard else name,
                clock,
                self._heard,
                lambda: self.unfinished,
                meter,
            )
            for shard, pool in enumerate(pools)
        ]
        self._turn = 0
        self._stranded_s: list[float | None] = [None] * len(pools)
        """Since when a shard cannot serve all of its requests."""
        self.stopping = asyncio.Event()
        """Set while a shard admits no new request: they are all told to stop, one by one."""
        self._mover: asyncio.Task[None] | None = None

    def submit(
        self, request: Request, timeout_s: float, record: FailureRecord | None = None
    ) -> InFlightRequest:
        """Hand a request to the shard that will be done with it first.

        Raises InvalidRequest for one that cannot be sent: a session would try it again and again.
        """
        try:
            encode([request])
        except NotEncodable as error:
            raise InvalidRequest("request", str(error)) from None
        shard = self._choose(request, request.max_new_tokens - len(request.committed))
        live = self.sessions[shard].submit(request, timeout_s, record)
        live.shard = shard
        return live

    def cancel(self, live: InFlightRequest) -> None:
        """The client is gone, or has all that it wants. Its Finish still comes."""
        self.sessions[live.shard].cancel(live)

    def cut_off(self, why: str) -> None:
        """Whatever is unfinished ends, as unavailable; clients may go on elsewhere."""
        for session in self.sessions:
            session.cut_off(why)

    @property
    def unfinished(self) -> int:
        return sum(len(session.unfinished) for session in self.sessions)

    @property
    def length_max(self) -> float:
        """The longest content that a replica holds, as far as is known here; else infinite."""
        loads = [session.load for session in self.sessions if session.load.serving]
        return max((load.length_max for load in loads), default=math.inf)

    @property
    def lacks_replicas(self) -> bool:
        """Whether all pools say that they have none."""
        loads = [session.load for session in self.sessions]
        return all(load.answers and not load.serving for load in loads)

    @property
    def idle(self) -> bool:
        """Whether no shard that answers has anything to do, as far as is known here."""
        loads = [session.load for session in self.sessions]
        busy = self.unfinished or any(load.outstanding_tokens for load in loads if load.answers)
        return self.ready and not busy

    @property
    def ready(self) -> bool:
        """Whether a replica takes requests now, as far as is known here."""
        loads = [session.load for session in self.sessions]
        return not self.stopping.is_set() and any(load.answers and load.serving for load in loads)

    async def status(self) -> PoolView:
        """All shards that answer in time, as one pool. Raises PoolUnreachable when none does."""
        answers = await self._asked(lambda pool: pool.status())
        views, silent = [], []
        for name, view in zip(self._names, answers, strict=True):
            if view is None:
                silent.append(name)
            else:
                views.append(replace(view, name=name) if len(answers) > 1 else view)
        if not views:
            raise PoolUnreachable(f"no answer from {', '.join(silent)}")
        return merged_view(views, silent)

    async def overviews(self) -> dict[int, PoolOverview]:
        """What operators see of the shards that answer in time, by their numbers. Raises
        PoolUnreachable when none does."""
        answers = await self._asked(lambda pool: pool.overview())
        shards = {shard: seen for shard, seen in enumerate(answers) if seen is not None}
        if not shards:
            raise PoolUnreachable(f"no answer from {', '.join(self._names)}")
        return shards

    async def _asked(self, question: Callable[[PoolPort], Awaitable[_T]]) -> list[_T | None]:
        """The answers of all shards. None: it does not answer, or not before the others are kept
        too long."""
        most_s = self._unreachable_s
        if len(self.pools) > 1:
            most_s = min(most_s, _STATUS_S)

        async def answer(pool: PoolPort) -> _T | None:
            try:
                async with asyncio.timeout(most_s):
                    return await question(pool)
            except (PoolUnreachable, TimeoutError):
                return None

        return await asyncio.gather(*map(answer, self.pools))

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        for session in self.sessions:
            session.start()
        if len(self.sessions) > 1:
            self._mover = asyncio.get_running_loop().create_task(self._move_forever())

    def check(self) -> None:
        """Raises RuntimeError when a loop has died."""
        for session in self.sessions:
            session.check()
        if self._mover is not None and self._mover.done():
            error = None if self._mover.cancelled() else self._mover.exception()
            raise RuntimeError("the loop that moves requests has died") from error

    async def close(self) -> None:
        if self._mover is not None:
            self._mover.cancel()
        await asyncio.gather(*(session.close() for session in self.sessions))

    # ------------------------------------------------------------------ parts

    def _choose(self, request: Request, tokens: int) -> int:
        self._turn += 1
        loads = [session.load for session in self.sessions]
        return choose_shard(loads, tokens, self._turn, request.length_max)

    def _heard(self) -> None:
        if any(session.stopping.is_set() for session in self.sessions):
            self.stopping.set()
        else:
            self.stopping.clear()
        if any(session.cut for session in self.sessions):
            # Also of a shard that cannot be heard.
            self.cut_off(STOPPING)

    async def _move_forever(self) -> None:
        while True:
            await asyncio.sleep(self._move_s / _LOOKS)
            self._move_stranded()

    def _move_stranded(self) -> None:
        """Requests of a shard that cannot serve them go to others, if one of those can."""
        now_s = self._clock()
        for shard, session in enumerate(self.sessions):
            since_s = self._stranded_s[shard]
            load, answered = session.load, session.answered
            stranded = [
                live
                for live in session.unfinished
                if not live.cancelled and not (answered and load.holds(live.request.length_max))
            ]
            if not stranded:
                self._stranded_s[shard] = None
            elif since_s is None:
                self._stranded_s[shard] = now_s
            elif now_s - since_s >= self._move_s:
                loads = [other.load for other in self.sessions if other is not session]
                moving = [live for live in stranded if _serves(loads, live)]
                if moving:
                    log.warning("%d requests that shard %d cannot serve move", len(moving), shard)
                    session.let_go(moving)
                for live in moving:
                    live.shard = self._choose(live.request, live.tokens_left)
                    self.sessions[live.shard].adopt(live)


def _serves(loads: Sequence[ShardLoad], live: InFlightRequest) -> bool:
    """Whether one of the shards takes it now, or says at once that it never will."""
    return any(
        load.answers
        and (load.holds(live.request.length_max) or (load.serving and not live.validated))
        for load in loads
    )
