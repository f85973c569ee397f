"""A frontend's side of the pool: submits, polls for token updates, starts over when it is gone.

One long poll brings the updates of all requests. Every request keeps the tokens delivered so far:
when the pool restarts, or has forgotten this frontend, all unfinished requests are submitted again
with them and go on where they were. Each start over is a new session with a new id: updates of
an older one can never be taken for updates of this one, and its lease ends by itself.

A pool whose invariant broke says, before it ends, which requests the event was about. They run
alone then; one that has ended three pools without a new token fails, and nothing else does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cluster.frontend.in_flight import InFlightRequest
from cluster.pool.protocol import (
    PoolLoad,
    PoolPort,
    PoolUnreachable,
    RecordNote,
    SubmitReply,
    TokenUpdate,
    UpdatesReply,
    silence_s,
)
from scheduler.messages import (
    Finish,
    FinishReason,
    Reject,
    RejectCode,
    Request,
    Submit,
    Usage,
)
from scheduler.scaling import ShardLoad

log = logging.getLogger("lockstep.frontend")

_RETRY_S = (0.05, 0.1, 0.2, 0.4)
"""Pauses between attempts to reach the pool; the last one repeats."""
_CALL_TOKENS_MAX = 1_000_000
_CALL_REQUESTS_MAX = 1000
"""What goes out with one call, so that a pool which is told everything again, by every frontend,
answers each of them in time; else they would begin again for ever."""
_PART_S = 0.5
"""How long a new session waits for what the pool has to say of the one before, and a link that is
closed for its loops to end."""
_ELSEWHERE = (RejectCode.OVERLOADED, RejectCode.INVALID)
"""What one pool refuses so, another one may accept. What none accepts a frontend sends to none, so
INVALID tells of this pool's replicas."""
_OVERDUE_S = 2.0
"""How long after its deadline a request is ended here, in case the pool cannot be asked."""
_POOL_FAILURES_MAX = 3
"""A request that ends so many pools in a row fails."""


class PoolSession:
    """All requests of one frontend process. One event loop calls it."""

    def __init__(
        self,
        pool: PoolPort,
        name: str,
        poll_s: float,
        unreachable_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        heard: Callable[[], None] = lambda: None,
        unfinished: Callable[[], int] | None = None,
        elsewhere: Callable[[InFlightRequest, Reject], Reject | None] = lambda _live, reject: (
            reject
        ),
    ) -> None:
        """Requests end as unreachable when the pool does not answer for `unreachable_s`.

        `heard` is called when the pool has said something new of itself; `unfinished` counts all
        requests of this process, where there are more than those of this link. `elsewhere` is told
        of a request that the pool has no room for, or no replica that can hold it, and which this
        link has forgotten; it says with what the request ends, or None where it goes on elsewhere.
        """
        self._pool = pool
        self._name = name
        self._poll_s = poll_s
        self._unreachable_s = unreachable_s
        self._clock = clock
        self._heard = heard
        self._unfinished = unfinished or (lambda: len(self._live))
        self._elsewhere = elsewhere
        self._live: dict[str, InFlightRequest] = {}
        self._left: dict[str, InFlightRequest] = {}
        """Requests that went on elsewhere and of which the pool has not said what they used."""
        self._queue: list[InFlightRequest] = []
        self._cancels: list[str] = []
        self._work = asyncio.Event()
        self._steady = asyncio.Event()
        self._steady.set()
        self._counter = 0
        self._session = ""
        self._incarnation: str | None = None
        self._registered = False
        """Whether the pool has answered a call of this session, and so knows it."""
        self._answered_s = clock()
        self._fruitless = 0
        """Sessions in a row that were begun because the pool answers, and in which it did not."""
        self._load = PoolLoad()
        self._unanswered = 0
        """Tokens of requests that the pool has not confirmed, so that its load lacks them."""
        self.stopping = asyncio.Event()
        """Set while the pool accepts no new request, as far as is known here."""
        self.cut = False
        """Whether it has said that the grace time of a stop is over."""
        self._tasks: list[asyncio.Task[None]] = []
        self._new_session()

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request, timeout_s: float) -> InFlightRequest:
        """Hand a request to the pool; its id is replaced by one of this session."""
        live = InFlightRequest(request, self._clock() + timeout_s, list(request.committed))
        self._enqueue(live)
        return live

    def adopt(self, live: InFlightRequest) -> None:
        """Hand over what another link has let go; it goes on where it was."""
        live.recovered += live.sent
        self._enqueue(live)

    def let_go(self, gone: Sequence[InFlightRequest]) -> None:
        """Forget requests that go on elsewhere, and have the pool forget them, too."""
        ids = {live.pool_id for live in gone}
        for live in gone:
            del self._live[live.pool_id]
            if live.sent:
                self._cancels.append(live.pool_id)
                self._left[live.pool_id] = live
                live.earlier[live.pool_id] = Usage()
        self._unanswered -= sum(live.tokens_left for live in self._queue if live.pool_id in ids)
        self._queue = [live for live in self._queue if live.pool_id not in ids]
        self._work.set()

    def cancel(self, live: InFlightRequest) -> None:
        """The client is gone, or has all that it wants. Its Finish still comes."""
        if live.pool_id in self._live and not live.cancelled:
            live.cancelled = True
            self._cancels.append(live.pool_id)
            self._work.set()

    def tell(self) -> None:
        """Call the pool now, so that it knows how many requests are unfinished."""
        self._work.set()

    def cut_off(self) -> None:
        """Whatever is unfinished ends here, as unreachable, and in the pool."""
        for live in list(self._live.values()):
            self.cancel(live)
        self._give_up()

    @property
    def unfinished(self) -> int:
        return len(self._live)

    @property
    def answered(self) -> bool:
        """Whether the pool has answered lately."""
        return self._clock() - self._answered_s < silence_s(self._poll_s)

    @property
    def load(self) -> ShardLoad:
        """What the pool has said of itself last, at most a poll ago, and what it does not know."""
        outstanding = self._load.outstanding_tokens + self._unanswered
        answers = self.answered and self._steady.is_set()
        return ShardLoad(self._load.serving, outstanding, answers, self._load.length_max)

    def stranded(self) -> list[InFlightRequest]:
        """What it has here that waits for the pool itself, or for a replica that can hold it."""
        load, answered = self.load, self.answered
        return [
            live
            for live in self._live.values()
            if not live.cancelled and not (answered and load.holds(live.request.length_max))
        ]

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._submit_forever()),
            loop.create_task(self._poll_forever()),
        ]

    def check(self) -> None:
        """Raises RuntimeError when a loop has died."""
        for task in self._tasks:
            if task.done():
                error = None if task.cancelled() else task.exception()
                raise RuntimeError("a loop between frontend and pool has died") from error

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            # Until they have ended, one of them may begin a session that nobody would part from.
            await asyncio.wait(self._tasks, timeout=_PART_S)
        with contextlib.suppress(PoolUnreachable):
            await self._pool.part(self._session)

    # ------------------------------------------------------------------ to the pool

    def _enqueue(self, live: InFlightRequest) -> None:
        self._counter += 1
        live.pool_id = f"{self._session}-{self._counter}"
        live.sent = False
        self._live[live.pool_id] = live
        self._queue.append(live)
        self._unanswered += live.tokens_left
        self._work.set()

    async def _submit_forever(self) -> None:
        """What comes while a call is under way goes out together with the next one."""
        while True:
            await self._work.wait()
            await self._steady.wait()
            self._work.clear()
            session = self._session
            queue, cancels = self._next_call()
            tokens = sum(live.tokens_left for live in queue)
            submits = [self._as_sent(live) for live in queue if live.finish is None]
            try:
                reply = await self._pool.submit(session, submits, cancels, self._unfinished())
            except PoolUnreachable as error:
                await self._start_over(session, f"no answer: {error}")
                continue
            if not await self._accepts(session, reply):
                continue
            if not reply.known:
                for unsent in queue:
                    # Others have moved to another shard meanwhile.
                    if self._live.get(unsent.pool_id) is unsent:
                        unsent.sent = False
                await self._start_over(session, "it has ended this session")
                continue
            self._registered = True
            self._unanswered = max(self._unanswered - tokens, 0)
            self._note(reply.load, reply.stopping)
            for reject in reply.rejects:
                self._left.pop(reject.request_id, None)
                if (live := self._live.pop(reject.request_id, None)) is not None:
                    self._refused(live, reject)
            for told in queue if reply.load.serving else ():
                # Others were refused, or have moved to another shard meanwhile.
                if self._live.get(told.pool_id) is told:
                    told.checked = True

    def _refused(self, live: InFlightRequest, reject: Reject) -> None:
        last: Reject | None = reject
        if reject.code in _ELSEWHERE and not live.cancelled:
            last = self._elsewhere(live, reject)
        if last is not None:
            live.reject = last
            live.end()

    def _next_call(self) -> tuple[list[InFlightRequest], list[str]]:
        """Requests to submit, and those to cancel; what is left goes out with the next call."""
        tokens = count = 0
        for live in self._queue:
            tokens += len(live.request.prompt) + len(live.tokens)
            if count == _CALL_REQUESTS_MAX or (count and tokens > _CALL_TOKENS_MAX):
                self._work.set()
                break
            count += 1
        queue, self._queue = self._queue[:count], self._queue[count:]
        # A cancel that comes before its request would be forgotten.
        later = {live.pool_id for live in self._queue}
        cancels = [one for one in self._cancels if one not in later]
        self._cancels = [one for one in self._cancels if one in later]
        return queue, cancels

    def _as_sent(self, live: InFlightRequest) -> Submit:
        live.sent = True
        request = replace(
            live.request,
            id=live.pool_id,
            committed=tuple(live.tokens),
            timeout_s=max(live.deadline_s - self._clock(), 0.001),
        )
        return Submit(
            request,
            accepted_before=live.recovered > 0,
            checked=live.checked,
            record=live.record,
        )

    # ------------------------------------------------------------------ from the pool

    async def _poll_forever(self) -> None:
        acknowledged = 0
        session = self._session
        while True:
            await self._steady.wait()
            if session != self._session:
                session, acknowledged = self._session, 0
            # The first poll may overtake the submit that makes this session known.
            registered = self._registered
            try:
                reply = await self._pool.updates(
                    session, acknowledged, self._poll_s, self._unfinished()
                )
            except PoolUnreachable as error:
                await self._start_over(session, f"no answer: {error}")
                continue
            self._expire()
            if not await self._accepts(session, reply):
                continue
            if registered and not reply.known:
                await self._start_over(session, "it does not know this frontend")
                continue
            self._registered = True
            acknowledged = self._take(reply, acknowledged)
            self.cut = reply.cut
            if reply.cut:
                self.cut_off()
            self._note(reply.load, reply.stopping)

    def _note(self, load: PoolLoad, stopping: bool) -> None:
        self._load = load
        if stopping:
            self.stopping.set()
        else:
            self.stopping.clear()
        self._heard()

    def _take(self, reply: UpdatesReply, acknowledged: int) -> int:
        for number, item in enumerate(reply.items, start=reply.first):
            if number <= acknowledged:
                continue
            acknowledged = number
            if isinstance(item, Finish):
                self._finish(item)
            elif isinstance(item, RecordNote):
                if (live := self._live.get(item.request_id)) is not None:
                    live.record = item.record
            else:
                self._deliver(item)
        return acknowledged

    def _deliver(self, update: TokenUpdate) -> None:
        live = self._live.get(update.request_id)
        if live is None:
            return
        tokens, seen = update.tokens, len(live.tokens) - update.start
        assert seen >= 0, "updates never skip a token"
        live.checked = True
        if seen < len(tokens):
            live.first_s = live.first_s or self._clock()
            live.tokens.extend(tokens[seen:])
            live.changed.set()

    def _finish(self, finish: Finish) -> None:
        live = self._live.pop(finish.request_id, None)
        if live is not None:
            live.finish = replace(finish, usage=live.usage(finish.usage))
            live.end()
        elif (live := self._left.pop(finish.request_id, None)) is not None:
            live.earlier[finish.request_id] = finish.usage

    def _expire(self) -> None:
        """The pool enforces deadlines; this is for when it cannot be asked."""
        limit_s = self._clock() - _OVERDUE_S
        for live in [live for live in self._live.values() if live.deadline_s < limit_s]:
            self._end_here(live, FinishReason.DEADLINE)

    def _end_here(self, live: InFlightRequest, reason: FinishReason, message: str = "") -> None:
        self._live.pop(live.pool_id, None)
        here = Usage(prompt_tokens=len(live.request.prompt), completion_tokens=len(live.tokens))
        live.finish = Finish(live.pool_id, reason, live.usage(here), message)
        live.end()

    # ------------------------------------------------------------------ starting over

    def _new_session(self) -> None:
        self._session = f"{self._name}.{uuid.uuid4().hex[:8]}"
        self._incarnation = None
        self._registered = False
        self.cut = False

    async def _accepts(self, session: str, reply: SubmitReply | UpdatesReply) -> bool:
        """Whether a reply is of this session and of the pool that it began with, which lives on."""
        if session != self._session:
            return False
        self._answered_s = self._clock()
        self._fruitless = 0
        if reply.failed is not None:
            self._pool_failed(reply.failed)
            await self._start_over(session, "it has failed")
            return False
        if self._incarnation is None:
            self._incarnation = reply.incarnation
        elif self._incarnation != reply.incarnation:
            await self._start_over(session, "it has restarted")
            return False
        return True

    def _pool_failed(self, request_ids: Sequence[str]) -> None:
        for live in [self._live[one] for one in request_ids if one in self._live]:
            live.pool_failed()
            if live.pool_failures >= _POOL_FAILURES_MAX:
                message = f"it has ended the pool {live.pool_failures} times"
                log.error("request %s: %s", live.pool_id, message)
                self._end_here(live, FinishReason.FAILED, message)

    async def _start_over(self, session: str, why: str) -> None:
        """Begin a new session with all unfinished requests, once the pool answers again."""
        if session != self._session:
            return
        if self._live:
            log.warning("pool: %s; %d requests start over", why, len(self._live))
        unfinished = list(self._live.values())
        told = self._left | {live.pool_id: live for live in unfinished if live.sent}
        self._live.clear()
        self._left.clear()
        self._queue.clear()
        self._cancels.clear()
        self._unanswered = 0
        self._new_session()
        self._steady.clear()
        for live in unfinished:
            live.recovered += live.sent
            self._enqueue(live)
            if live.cancelled:
                self._end_here(live, FinishReason.CANCELLED)
        try:
            await self._reach()
            # The requests wait for it, so that what the pool frees is free when they come again.
            with contextlib.suppress(PoolUnreachable, TimeoutError):
                async with asyncio.timeout(_PART_S):
                    await self._part(session, told)
        finally:
            self._steady.set()

    async def _part(self, session: str, told: Mapping[str, InFlightRequest]) -> None:
        """End a session that was given up, in the pool, too, if that still knows it; and note what
        the requests that it was told of had used there."""
        reply = await self._pool.part(session)
        for request_id, usage in reply.used.items():
            if (live := told.get(request_id)) is not None and usage.steps:
                live.earlier[request_id] = usage

    async def _reach(self) -> None:
        """Returns when the pool answers; after a pause if it did so before, to no avail."""
        attempt = self._fruitless
        while True:
            if attempt:
                self._expire()
                if self._clock() - self._answered_s > self._unreachable_s:
                    self._give_up()
                await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S)) - 1])
            try:
                await self._pool.status()
            except PoolUnreachable:
                attempt += 1
            else:
                if not self._fruitless:
                    # Else it lives, but requests are no better off for it.
                    self._answered_s = self._clock()
                self._fruitless += 1
                return

    def _give_up(self) -> None:
        for live in list(self._live.values()):
            self._live.pop(live.pool_id, None)
            live.unreachable = True
            live.end()
        self._queue.clear()
        self._unanswered = 0
