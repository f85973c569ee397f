"""A frontend's side of one pool: hands it requests, takes token updates, starts over without it.

A session is one stream. Every request keeps the tokens delivered so far: when the stream ends,
because the pool restarts or the network broke, a new session with a new id takes its place, and all
unfinished requests are submitted again and go on where they were. So updates of an older session
can never be taken for updates of this one.

A pool whose invariant broke says, before it ends, which requests the event was about. They run
alone then; one that has ended three pools without a new token fails, and nothing else does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from cluster.config import PoolConfig
from cluster.frontend.pool_session.in_flight import InFlightRequest
from cluster.metrics import FrontendMeter
from cluster.pool.protocol import (
    FRONTEND,
    STOPPING,
    Beat,
    Counted,
    FrontendMessage,
    PoolPort,
    PoolState,
    PoolUnreachable,
)
from cluster.transport import Stream, StreamLost
from scheduler.messages import (
    Cancel,
    Emit,
    FailureRecord,
    Finish,
    FinishReason,
    RecordFailure,
    Reject,
    Request,
    Usage,
)
from scheduler.scaling import ShardLoad

log = logging.getLogger("lockstep.frontend")

_RETRY_S = (0.05, 0.1, 0.2, 0.4)
"""Pauses between attempts to reach the pool; the last one repeats."""
_SILENT_S = 5.0
"""How long a pool may leave a beat unanswered before the session is given up."""
_REFUSES_S = 1.0
"""A pool that has replicas refuses what none of them can hold within less than that."""
_OVERDUE_S = 2.0
"""How long after its deadline a request is ended here, in case the pool cannot be asked."""
_POOL_FAILURES_MAX = 3
"""A request that ends so many pools in a row fails."""


class PoolSession:
    """All requests of one frontend process in one pool. One event loop calls it."""

    def __init__(
        self,
        pool: PoolPort,
        config: PoolConfig,
        name: str,
        clock: Callable[[], float],
        heard: Callable[[], None],
        unfinished: Callable[[], int],
        meter: FrontendMeter,
    ) -> None:
        """`heard` is called when the pool has said something new of itself; `unfinished` counts all
        requests of this process; what `meter` has counted goes to whichever pool is told first."""
        self._pool = pool
        self._config = config
        self._name = name
        self._clock = clock
        self._heard = heard
        self._unfinished = unfinished
        self._meter = meter
        self._live: dict[str, InFlightRequest] = {}
        """By the ids that they have in this session."""
        self._counter = 0
        self._session = self._new_id()
        self._stream: Stream | None = None
        """None while there is no session."""
        self._answered_s = clock()
        self._unsure: deque[InFlightRequest] = deque()
        """Those that the pool may refuse yet, in the order in which it was told."""
        self._said = ShardLoad(length_max=0)
        """What the pool has said of its load last."""
        self._sent_tokens = 0
        """What requests may commit that were handed to it since then."""
        self.stopping = asyncio.Event()
        """Set while the pool admits no new request, as far as is known here."""
        self.cut = False
        """Whether it has said that the grace time of a stop is over."""
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ requests

    def submit(
        self, request: Request, timeout_s: float, record: FailureRecord | None = None
    ) -> InFlightRequest:
        """Hand a request to the pool; its id is replaced by one of this session. `record`: what
        counts against it already."""
        deadline_s = self._clock() + timeout_s
        live = InFlightRequest(request, deadline_s, list(request.committed))
        live.record = record or live.record
        self._take_over(live)
        return live

    def adopt(self, live: InFlightRequest) -> None:
        """Take over what another session has let go; it goes on where it was."""
        live.recovered += live.sent_s is not None
        self._take_over(live)

    def let_go(self, gone: Sequence[InFlightRequest]) -> None:
        """Forget requests that go on elsewhere, and have the pool forget them, too."""
        for live in gone:
            del self._live[live.pool_id]
            if live.sent_s is not None:
                self._send(Cancel(live.pool_id))

    def cancel(self, live: InFlightRequest) -> None:
        """The client is gone, or has all that it wants. Its Finish still comes."""
        if live.pool_id in self._live and not live.cancelled:
            live.cancelled = True
            if live.sent_s is not None:
                self._send(Cancel(live.pool_id))
            else:
                self._end_here(live, FinishReason.CANCELLED)

    def tell(self) -> None:
        """Let the pool know now how many requests are unfinished."""
        self._send(Beat(self._unfinished()))

    def cut_off(self, why: str) -> None:
        """Whatever is unfinished ends here, as unavailable, and in the pool."""
        for live in self._live.values():
            self._send(Cancel(live.pool_id))
            live.cut = why
            live.end()
        self._live.clear()

    @property
    def unfinished(self) -> Collection[InFlightRequest]:
        return self._live.values()

    @property
    def answered(self) -> bool:
        """Whether the pool has answered lately."""
        return self._clock() - self._answered_s < self._config.lease_s

    @property
    def load(self) -> ShardLoad:
        """What the pool has said of itself last, and what it does not know yet."""
        said = self._said
        tokens = said.outstanding_tokens + said.expected_share * self._sent_tokens
        answers = self.answered and self._stream is not None
        return replace(said, answers=answers, outstanding_tokens=tokens)

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def check(self) -> None:
        """Raises RuntimeError when its loop has died."""
        if self._task is not None and self._task.done():
            error = None if self._task.cancelled() else self._task.exception()
            raise RuntimeError("the loop between frontend and pool has died") from error

    async def close(self) -> None:
        """End the session; the pool cancels what is unfinished."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # ------------------------------------------------------------------ sessions

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._hold_sessions())
            loops.create_task(self._bound_waits())

    async def _hold_sessions(self) -> None:
        attempt = 0
        while True:
            answered_s = self._answered_s
            try:
                await self._hold_session(await self._pool.connect(FRONTEND, self._session))
            except (PoolUnreachable, StreamLost) as error:
                if self._live:
                    log.warning("pool: %s; %d requests wait", error, len(self._live))
            # One that lives but ends every session is asked with pauses, too.
            attempt = 0 if self._answered_s > answered_s else attempt + 1
            if attempt:
                await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S)) - 1])

    async def _hold_session(self, stream: Stream) -> None:
        """From the first message until the stream ends. Raises StreamLost then."""
        beating = asyncio.get_running_loop().create_task(self._beat(stream))
        try:
            self._stream = stream
            stream.send(Beat(self._unfinished()))
            for live in list(self._live.values()):
                self._submit(stream, live)
            async for messages in stream.frames():
                self._answered_s = self._clock()
                for message in messages:
                    self._take(message)
            raise StreamLost("it has ended the session")
        finally:
            self._stream = None
            self._start_over()
            beating.cancel()
            await stream.close()

    async def _beat(self, stream: Stream) -> None:
        while True:
            await asyncio.sleep(self._config.beat_s)
            if self._clock() - self._answered_s > self._config.beat_s + _SILENT_S:
                stream.cancel()
            stream.send(Beat(self._unfinished()))
            if counted := self._meter.take():
                stream.send(Counted(counted))

    async def _bound_waits(self) -> None:
        """End requests in time, whatever the session's own loop waits for meanwhile."""
        while True:
            self._expire()
            left_s = self._answered_s + self._config.unreachable_s - self._clock()
            if left_s <= 0:
                self.cut_off("the pool does not answer")
            await asyncio.sleep(min(max(left_s, _RETRY_S[0]), self._config.beat_s))

    def _start_over(self) -> None:
        """All unfinished requests wait for the next session, under new ids."""
        unfinished = list(self._live.values())
        self._session = self._new_id()
        self._live.clear()
        self._unsure.clear()
        self._sent_tokens = 0
        self.cut = False
        for live in unfinished:
            live.recovered += live.sent_s is not None
            self._take_over(live)
            if live.cancelled:
                self._end_here(live, FinishReason.CANCELLED)

    def _new_id(self) -> str:
        return f"{self._name}.{uuid.uuid4().hex[:8]}"

    # ------------------------------------------------------------------ to the pool

    def _take_over(self, live: InFlightRequest) -> None:
        self._counter += 1
        live.pool_id = f"{self._session}-{self._counter}"
        live.sent_s = None
        self._live[live.pool_id] = live
        self._sent_tokens += live.tokens_left
        if self._stream is not None:
            self._submit(self._stream, live)

    def _submit(self, stream: Stream, live: InFlightRequest) -> None:
        live.sent_s = self._clock()
        stream.send(live.to_submit(live.sent_s))
        if not live.validated:
            self._unsure.append(live)

    def _send(self, message: Beat | Cancel) -> None:
        """To a pool that will hear all of it anew there is nothing to say."""
        if self._stream is not None:
            self._stream.send(message)

    # ------------------------------------------------------------------ from the pool

    def _take(self, message: FrontendMessage) -> None:
        """Raises StreamLost when the pool says that it ends."""
        match message:
            case Emit(request_id):
                if (live := self._live.get(request_id)) is not None:
                    self._updated(live, message)
            case Finish(request_id, _, usage):
                if (live := self._live.pop(request_id, None)) is not None:
                    live.finish = replace(message, usage=live.usage(usage))
                    live.end()
            case RecordFailure(request_id, record):
                if (live := self._live.get(request_id)) is not None:
                    live.record = record
            case Reject(request_id):
                if (live := self._live.pop(request_id, None)) is not None:
                    live.reject = message
                    live.end()
            case PoolState():
                self._note(message)

    def _updated(self, live: InFlightRequest, update: Emit) -> None:
        now_s = self._clock()
        if update.tokens and live.last_s:
            self._meter.tokens(len(update.tokens), now_s - live.last_s)
        live.take(update, now_s)

    def _note(self, state: PoolState) -> None:
        self._said, self._sent_tokens = state.load, 0
        told_s = self._clock() - _REFUSES_S if state.load.serving else -math.inf
        while self._unsure:
            live = self._unsure[0]
            here = live.pool_id in self._live
            if here and live.sent_s is not None and live.sent_s >= told_s:
                break
            live.validated |= here
            self._unsure.popleft()
        self.cut = state.cut
        if state.cut:
            self.cut_off(STOPPING)
        if not state.stopping:
            self.stopping.clear()
        elif not self.stopping.is_set():
            self.stopping.set()
            self.tell()
        self._heard()
        if state.failed is not None:
            self._pool_failed(state.failed)
            raise StreamLost("it has failed")

    def _pool_failed(self, request_ids: Sequence[str]) -> None:
        for live in [self._live[name] for name in request_ids if name in self._live]:
            live.pool_failed()
            if live.pool_failures >= _POOL_FAILURES_MAX:
                message = f"it has ended the pool {live.pool_failures} times"
                log.error("request %s: %s", live.pool_id, message)
                self._end_here(live, FinishReason.FAILED, message)

    # ------------------------------------------------------------------ without the pool

    def _expire(self) -> None:
        """The pool enforces deadlines; this is for when it cannot be asked."""
        limit_s = self._clock() - _OVERDUE_S
        for live in [live for live in self._live.values() if live.deadline_s < limit_s]:
            self._end_here(live, FinishReason.DEADLINE)

    def _end_here(self, live: InFlightRequest, reason: FinishReason, message: str = "") -> None:
        del self._live[live.pool_id]
        here = Usage(prompt_tokens=len(live.request.prompt), completion_tokens=len(live.tokens))
        live.finish = Finish(live.pool_id, reason, live.usage(here), message)
        live.end()
