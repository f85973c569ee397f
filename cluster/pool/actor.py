"""The pool as an actor: drives the pure Scheduler and passes its actions on. Knows no Ray.

Each worker and each frontend has a stream to it. A peer whose stream ends, or that is silent for
longer than the lease, is lost: a replica's residents wait again, a frontend's requests are
cancelled. The loss of a process that has died or stands still counts against the batches in hand;
that of a stream alone does not. Nothing here needs to outlive this process: a new incarnation is
told everything again by its peers. So a broken invariant ends it: half-made actions might lose what
a restart does not.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from cluster.config import ClusterConfig
from cluster.metrics import PoolMeter
from cluster.pool.leaving import Leaving
from cluster.pool.overview import BATCHES_MAX, batch_view, requests_in_flight
from cluster.pool.peers import FrontendPeer, WorkerPeer, deliver, incompatible, load_of, requests_of
from cluster.pool.protocol import (
    BatchView,
    Beat,
    Counted,
    DrainNote,
    LeaveNote,
    PoolFailed,
    PoolOverview,
    PoolState,
    PoolView,
    StopReply,
)
from cluster.transport import Stream
from scheduler.messages import (
    Batch,
    Cancel,
    Event,
    Reject,
    RejectCode,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    ReplicaSpec,
    StepDone,
    StepFailed,
    StepResult,
    Submit,
    Tick,
)
from scheduler.scheduler import Scheduler

log = logging.getLogger("lockstep.pool")

_TICK_S = 0.05
"""How often deadlines and leases are checked, at least."""
_IDLE_EXIT_S = 60.0
"""The process ends after so long without a call."""
_LAST_WORDS_S = 0.2
"""How long a pool that has failed lives on, so that frontends hear of which event."""


class PoolActor:
    """One event loop calls it; no method blocks."""

    def __init__(
        self,
        config: ClusterConfig,
        probe: Callable[[Any], Awaitable[bool]] | None = None,
        leave: Callable[[], None] | None = None,
        abort: Callable[[], None] | None = None,
        meter: PoolMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`probe` asks whether the process behind a worker answers; without one it does. `leave`
        ends this one for good after a minute without a peer; `abort` ends it so that it is started
        anew, once an invariant is broken."""
        self._config = config.pool
        self.scheduler = Scheduler(config.scheduler)
        self._probe = probe
        self._leave = leave
        self._abort = abort
        self._failed: tuple[str, ...] | None = None
        """The requests of the event that has broken this pool."""
        self._clock = clock
        self._incarnation = uuid.uuid4().hex[:12]
        self._started_s = self._heard_s = self._ticked_s = clock()
        self._workers: dict[str, WorkerPeer] = {}
        """By the replica's id."""
        self.frontends: dict[str, FrontendPeer] = {}
        """By the session's id."""
        self._owners: dict[str, FrontendPeer] = {}
        """Which frontend a live request belongs to."""
        self._leaving = Leaving(config)
        self._stopping_until_s = -math.inf
        self._cut = False
        self._ticker: asyncio.Task[None] | None = None
        self._meter = meter or PoolMeter()
        self._batches: deque[BatchView] = deque(maxlen=BATCHES_MAX)

    # ------------------------------------------------------------------ workers

    async def join(self, replica_id: str, spec: ReplicaSpec, process: Any) -> str:
        """A new membership of a replica, or why there is none; `process` is what `probe`
        understands."""
        self._wake_up()
        if refused := incompatible(
            spec, {worker_id: peer.spec for worker_id, peer in self._workers.items()}
        ):
            log.error("replica %s is refused: %s", replica_id, refused)
            return refused
        if replica_id not in self._workers:
            log.info("replica %s joins: %s blocks on %s", replica_id, spec.kv_blocks, spec.device)
            self._workers[replica_id] = WorkerPeer(replace(spec, trials=()), process, self._clock())
            self._step(ReplicaJoined(replica_id, spec))
            self._let_go()
            self._tell_frontends()
        return ""

    async def serve_worker(self, replica_id: str, stream: Stream) -> None:
        """Takes results and gives what there is to do until the worker ends the stream."""
        worker = self._workers.get(replica_id)
        if worker is None or worker.stream is not None:
            # It joins anew, under another id.
            return
        worker.stream = stream
        worker.flush_within(0.0)
        try:
            async for messages in stream.frames():
                if worker is self._workers.get(replica_id):
                    self._heard_s = worker.heard_s = self._clock()
                    for message in messages:
                        self._take(replica_id, worker, message)
        except PoolFailed:
            return
        finally:
            if worker is self._workers.get(replica_id):
                await self._stream_lost(replica_id, worker)

    async def _stream_lost(self, replica_id: str, worker: WorkerPeer) -> None:
        """With its process, or by the network alone."""
        lives = self._probe is None or await self._probe(worker.process)
        if self._failed is None and worker is self._workers.get(replica_id):
            why = "has lost its stream" if lives else "has died"
            self._lose_worker(replica_id, why, by_batch=not lives)

    def _take(self, replica_id: str, worker: WorkerPeer, message: object) -> None:
        match message:
            case StepResult(batch_id):
                if (batch := worker.batches.pop(batch_id, None)) is not None:
                    self._step(StepDone(message), batch)
                    self._batches.append(batch_view(batch, message))
            case StepFailed(_, batch_id):
                if (batch := worker.batches.pop(batch_id, None)) is not None:
                    self._step(message, batch)
            case DrainNote(successor) if worker.successor is None:
                worker.successor, worker.going_s = successor, self._clock()
                self._let_go()
            case LeaveNote(by_batch):
                why = "hangs or is broken" if by_batch else "has left"
                self._lose_worker(replica_id, why, by_batch)
                return
        worker.hand_over()

    def _let_go(self) -> None:
        """Drain the replicas that want to go and may."""
        live, served = self.scheduler.pool.live_count(), bool(self.frontends)
        due = self._leaving.due(self._workers, served, live, self._clock(), self._stopping)
        for replica_id in due:
            self._step(ReplicaDraining(replica_id))
            self._workers[replica_id].hand_over()
            self._tell_frontends()

    # ------------------------------------------------------------------ frontends

    async def serve_frontend(self, session: str, stream: Stream) -> None:
        """Takes requests and gives what becomes of them until the frontend ends the stream."""
        if self._failed is not None:
            return
        self._wake_up()
        frontend = FrontendPeer(stream, self._clock(), self._state)
        self.frontends[session] = frontend
        frontend.flush()
        try:
            async for messages in stream.frames():
                if frontend is self.frontends.get(session):
                    self._heard_s = frontend.heard_s = self._clock()
                    for message in messages:
                        self._hear(frontend, message)
        except PoolFailed:
            return
        finally:
            if self._failed is None and frontend is self.frontends.get(session):
                self._lose_frontend(session, "has left")

    def _hear(self, frontend: FrontendPeer, message: Any) -> None:
        match message:
            case Submit(request):
                if why := self._leaving.refuses(message, self._stopping):
                    frontend.post(Reject(request.id, RejectCode.STOPPING, "", why))
                    frontend.flush()
                    return
                frontend.requests.add(request.id)
                self._owners[request.id] = frontend
                self._step(message)
                frontend.flush_soon()
            case Cancel(request_id):
                if request_id in frontend.requests:
                    self._step(message)
            case Counted(sums):
                self._meter.told(sums)
            case Beat():
                frontend.unfinished = message.unfinished
                frontend.flush()

    async def status(self) -> PoolView:
        """The scheduler's snapshot and what the actor knows beside it."""
        self._wake_up()
        return PoolView(
            incarnation=self._incarnation,
            uptime_s=self._clock() - self._started_s,
            status=self.scheduler.snapshot(),
            stopping=self._stopping,
        )

    async def overview(self) -> PoolOverview:
        """What operators see of this pool."""
        view, sums = await self.status(), self._meter.sums(self.scheduler)
        requests = requests_in_flight(self.scheduler.pool.sequences, self._clock())
        return PoolOverview(view, sums, tuple(self._batches), requests)

    # ------------------------------------------------------------------ stopping

    async def stop_admitting(self, for_s: float, cut: bool = False) -> StopReply:
        """Refuse new requests for `for_s` from now on; says what is unfinished.

        With `cut` the frontends end that, too. The limit heals a stop that never came to its end.
        """
        self._wake_up()
        changed = cut and not self._cut if self._stopping else True
        self._stopping_until_s, self._cut = self._clock() + for_s, cut
        if changed:
            log.info("no new request is admitted%s", ", the unfinished ones end" if cut else "")
            self._tell_frontends()
        told = 0
        if self._config.shards > 1:
            # One that moves from shard to shard may be in none of them at the moment. Frontends say
            # what they have with each beat, so a stop may hear of the last one's end a beat later.
            told = sum(frontend.unfinished for frontend in self.frontends.values())
        age_s = self._clock() - self._started_s
        return StopReply(max(self.scheduler.snapshot().live, told), age_s > self._config.lease_s)

    @property
    def _stopping(self) -> bool:
        return self._clock() < self._stopping_until_s

    # ------------------------------------------------------------------ the crank

    def _step(self, event: Event, batch: Batch | None = None) -> None:
        """`batch`: the one that the event ends. Raises PoolFailed where an invariant is broken."""
        if self._failed is not None:
            raise PoolFailed("the pool has failed and ends")
        try:
            actions = self.scheduler.step(event, self._clock())
            deliver(actions, self._workers, self._owners, self._meter)
        except Exception as error:
            self._fail(event, batch, error)
            raise PoolFailed("an invariant of the pool is broken") from error

    def _fail(self, event: Event, batch: Batch | None, error: Exception) -> None:
        """Tell the frontends which event it was, and end: what is half-made must not go on."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        self._failed = requests = requests_of(event, batch)
        # Neither the error's text nor a value: tokens may stand in them.
        log.critical(
            "the pool ends and is started anew: %s at %s:%s in %s of %s",
            *(type(error).__name__, frame.filename, frame.lineno, type(event).__name__),
            ", ".join(requests) or getattr(event, "replica_id", "no request"),
        )
        self._tell_frontends()
        if self._abort is not None:
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._abort)

    def _state(self) -> PoolState:
        load = load_of(self._workers, self.scheduler, self._leaving.awaits_successor)
        return PoolState(load, self._stopping, self._stopping and self._cut, self._failed)

    def _tell_frontends(self) -> None:
        """What the pool says of itself has changed."""
        for frontend in self.frontends.values():
            frontend.flush()

    # ------------------------------------------------------------------ leases

    def _wake_up(self) -> None:
        if self._failed is not None:
            raise PoolFailed("the pool has failed and ends")
        self._heard_s = self._clock()
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    async def _tick_forever(self) -> None:
        while self._failed is None:
            await asyncio.sleep(min(_TICK_S, self._config.lease_s / 60))
            try:
                self.tick()
            except Exception as error:
                if self._failed is None:
                    self._fail(Tick(), None, error)

    def tick(self) -> None:
        """Enforces deadlines and leases; the actor calls it all the time."""
        now_s = self._clock()
        away_s, self._ticked_s = now_s - self._ticked_s, now_s
        if away_s > self._config.lease_s / 2:
            # This process stood still. What the others said meanwhile may be still unread.
            for worker in self._workers.values():
                worker.heard_s = now_s
            for frontend in self.frontends.values():
                frontend.heard_s = now_s
        self._step(Tick())
        self._let_go()
        for replica_id, worker in list(self._workers.items()):
            if (silent_s := now_s - worker.heard_s) > self._config.lease_s:
                # What has no stream yet has begun no batch.
                begun = worker.stream is not None
                self._lose_worker(replica_id, f"is silent for {silent_s:.1f} s", by_batch=begun)
        for session, frontend in list(self.frontends.items()):
            if (silent_s := now_s - frontend.heard_s) > self._config.lease_s:
                self._lose_frontend(session, f"is silent for {silent_s:.1f} s")
        self._meter.observe(self.scheduler, now_s)
        idle = not self._workers and not self.frontends
        if idle and self._leave and now_s - self._heard_s > _IDLE_EXIT_S:
            log.info("no peer talks to the pool, it leaves")
            self._leave()

    def _lose_worker(self, replica_id: str, why: str, by_batch: bool) -> None:
        worker = self._workers.pop(replica_id)
        log.warning("replica %s %s", replica_id, why)
        worker.close()
        self._step(ReplicaLost(replica_id, by_batch))
        self._tell_frontends()

    def _lose_frontend(self, session: str, why: str) -> None:
        frontend = self.frontends.pop(session)
        frontend.close()
        log.warning("frontend %s %s; %d requests cancelled", session, why, len(frontend.requests))
        lost = list(frontend.requests)
        # All before the first step, which may end others of them: by their deadlines.
        for request_id in lost:
            self._owners.pop(request_id, None)
        for request_id in lost:
            self._step(Cancel(request_id))
