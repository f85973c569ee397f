"""An ingress's side of all shards: chooses one for each request, and looks at them as one pool.

Each shard has a `PoolLink` of its own, which knows nothing of the others. What is handed to a shard
stays there, unless it has no replica, or does not answer, while another one serves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from cluster.live_request import LiveRequest
from cluster.pool_link import PoolLink
from cluster.protocol import PoolPort, PoolUnreachable, PoolView, merged_view
from scheduler.messages import Request
from scheduler.sharding import choose_shard

log = logging.getLogger("lockstep.ingress")

_LOOKS = 4
"""How often, within the time that stranded requests may wait, they are looked for."""


class ShardLinks:
    """All requests of one ingress process. One event loop calls it."""

    def __init__(
        self,
        pools: Sequence[PoolPort],
        name: str,
        poll_s: float,
        move_s: float = 1.0,
        unreachable_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`move_s`: how long requests wait for a shard that cannot serve them."""
        self._pools = pools
        self._move_s = move_s
        self._clock = clock
        self.links = [
            PoolLink(
                pool,
                f"{name}.{shard}" if shard else name,
                poll_s,
                unreachable_s,
                clock,
                self._heard,
            )
            for shard, pool in enumerate(pools)
        ]
        self._turn = 0
        self._stranded_s: list[float | None] = [None] * len(pools)
        """Since when a shard's requests cannot be served."""
        self.stopping = asyncio.Event()
        """Set while a shard accepts no new request: they are all told to stop, one by one."""
        self._mover: asyncio.Task[None] | None = None

    def submit(self, request: Request, timeout_s: float) -> LiveRequest:
        """Hand a request to the shard that will be done with it first."""
        shard = self._choose(request.max_new_tokens - len(request.committed))
        live = self.links[shard].submit(request, timeout_s)
        live.shard = shard
        return live

    def cancel(self, live: LiveRequest) -> None:
        """The client is gone, or has all that it wants. Its Finish still comes."""
        self.links[live.shard].cancel(live)

    @property
    def unfinished(self) -> int:
        return sum(link.unfinished for link in self.links)

    async def status(self) -> PoolView:
        """All shards that answer, as one pool. Raises PoolUnreachable when none does."""
        answers = await asyncio.gather(
            *(pool.status() for pool in self._pools), return_exceptions=True
        )
        views = []
        for answer in answers:
            if isinstance(answer, PoolView):
                views.append(answer)
            elif not isinstance(answer, PoolUnreachable):
                raise answer
        if not views:
            raise PoolUnreachable("no shard answers")
        return merged_view(views)

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        for link in self.links:
            link.start()
        if len(self.links) > 1:
            self._mover = asyncio.get_running_loop().create_task(self._move_forever())

    def check(self) -> None:
        """Raises RuntimeError when a loop has died."""
        for link in self.links:
            link.check()
        if self._mover is not None and self._mover.done():
            error = None if self._mover.cancelled() else self._mover.exception()
            raise RuntimeError("the loop that moves requests has died") from error

    async def close(self) -> None:
        if self._mover is not None:
            self._mover.cancel()
        await asyncio.gather(*(link.close() for link in self.links))

    # ------------------------------------------------------------------ parts

    def _choose(self, tokens: int) -> int:
        self._turn += 1
        return choose_shard([link.load for link in self.links], tokens, self._turn)

    def _heard(self) -> None:
        if any(link.stopping.is_set() for link in self.links):
            self.stopping.set()
        else:
            self.stopping.clear()

    async def _move_forever(self) -> None:
        while True:
            await asyncio.sleep(self._move_s / _LOOKS)
            self._move_stranded()

    def _move_stranded(self) -> None:
        """Requests of a shard that cannot serve them go to others, if one of those can."""
        now_s = self._clock()
        for shard, link in enumerate(self.links):
            since_s = self._stranded_s[shard]
            if not link.stranded:
                self._stranded_s[shard] = None
            elif since_s is None:
                self._stranded_s[shard] = now_s
            elif now_s - since_s >= self._move_s and self._others_serve(shard):
                moving = link.let_go()
                if moving:
                    log.warning("shard %d cannot serve; %d requests move", shard, len(moving))
                for live in moving:
                    live.shard = self._choose(live.tokens_left)
                    self.links[live.shard].adopt(live)
                self._stranded_s[shard] = None

    def _others_serve(self, shard: int) -> bool:
        loads = [link.load for other, link in enumerate(self.links) if other != shard]
        return any(load.answers and load.serving for load in loads)
