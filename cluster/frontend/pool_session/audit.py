"""The online audit: a share of the finished requests is decoded again, by the target alone.

Alone means without drafts, in batches of one row, on KV that no other request has left. Whatever
the first time had a part in the output, drafter, batch, schedule, replica or failure, has none the
second time, so the tokens must be the same. Audits run while nothing else does: the first request
that comes ends the one in hand, which begins again later.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace

from cluster.config import AuditConfig
from cluster.frontend.pool_session.in_flight import InFlightRequest
from cluster.frontend.pool_session.shard_router import ShardRouter
from cluster.metrics import FrontendMeter
from scheduler.messages import FailureRecord, FinishReason, Priority, Request

log = logging.getLogger("lockstep.audit")

_KEPT_MAX = 64
"""Requests that wait for their audit, the newest ones."""
_LOOK_S = 0.2
"""How often it is seen whether the server idles, or no longer does."""
_TIMEOUT_S = 600.0
_FOR_EVER = 1 << 30
_ALONE = FailureRecord(rows_limit=1, broke_at=_FOR_EVER, quarantined_until=_FOR_EVER)


@dataclass(frozen=True, slots=True)
class Finished:
    """What is left of a request that has ended."""

    request_id: str
    """As the log calls it."""
    request: Request
    tokens: tuple[int, ...]
    """All new ones, those included that came with the request."""

    def alone(self) -> Request:
        """The request that must give the same tokens."""
        decoding = self.request.decoding
        if decoding is not None:
            decoding = replace(decoding, logprobs=None, prompt_logprobs=None)
        return replace(
            self.request,
            max_new_tokens=len(self.tokens),
            draft_len=0,
            timeout_s=_TIMEOUT_S,
            priority=Priority.LOW,
            tenant="",
            cache_salt=uuid.uuid4().hex,
            decoding=decoding,
        )


class Audit:
    """Of one frontend process. One event loop calls it."""

    def __init__(self, config: AuditConfig, router: ShardRouter, meter: FrontendMeter) -> None:
        self._share = config.share
        self._router = router
        self._meter = meter
        self._waiting: deque[Finished] = deque(maxlen=_KEPT_MAX)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._share:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def check(self) -> None:
        """Raises RuntimeError when its loop has died."""
        if self._task is not None and self._task.done():
            raise RuntimeError("the loop of the audit has died") from self._task.exception()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def waiting(self) -> int:
        """Requests that are to be audited."""
        return len(self._waiting)

    def offer(self, live: InFlightRequest, request_id: str) -> None:
        """A request that has ended, or that nobody reads on. Its share of them is audited."""
        if random.random() < self._share and len(live.tokens) > len(live.request.committed):
            self._waiting.append(Finished(request_id, live.request, tuple(live.tokens)))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            while self._waiting and self._router.idle:
                finished = self._waiting.pop()
                if not await self._audited(finished):
                    self._waiting.append(finished)

    async def _audited(self, finished: Finished) -> bool:
        """Whether it came to an end before something else wanted the replicas."""
        live = self._router.submit(finished.alone(), _TIMEOUT_S, _ALONE)
        try:
            while not live.ended.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await live.ended.wait()
                if self._router.unfinished > 1 or self._router.stopping.is_set():
                    return False
        finally:
            self._router.cancel(live)
        finish = live.finish
        if finish is None or finish.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            # It was lost with its pool, or could not be finished; it says nothing.
            return True
        self._compare(finished, live.tokens)
        return True

    def _compare(self, finished: Finished, tokens: list[int]) -> None:
        pairs = zip(finished.tokens, tokens, strict=False)
        same = next((at for at, (was, now) in enumerate(pairs) if was != now), len(tokens))
        differs = same < len(finished.tokens)
        if differs:
            # Where, and never what.
            log.error("audit: request id=%r differs at new token %d", finished.request_id, same)
        self._meter.audited(len(finished.tokens), differs)
