"""The pool as an actor: drives the pure Scheduler and passes its actions on. Knows no Ray.

Workers pull batches, frontends poll for token updates; both read ack queues, which survive lost
replies. A peer that is silent for longer than the lease is lost: a replica's residents wait again,
a frontend's requests are cancelled. Nothing here needs to outlive the process: a new incarnation is
told everything again by its peers. So a broken invariant ends it: half-made actions might lose what
a restart does not.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from cluster.config import ClusterConfig
from cluster.frontend.metrics import PoolMeter
from cluster.pool.ack_queue import AckQueue
from cluster.pool.peers import FrontendPeer, Probe, ReplicaPeer
from cluster.pool.protocol import (
    STOPPING,
    FailureNote,
    InterruptNote,
    JoinReply,
    PartReply,
    PoolFailed,
    PoolLoad,
    PoolView,
    PullReply,
    RecordNote,
    ReleaseNote,
    StopReply,
    SubmitReply,
    TokenUpdate,
    UpdatesReply,
    silence_s,
)
from cluster.transport.endpoint import calling_peer
from scheduler.messages import (
    Action,
    Batch,
    Cancel,
    Dispatch,
    Emit,
    Event,
    Finish,
    Interrupt,
    PrefillRow,
    RecordFailure,
    Reject,
    RejectCode,
    Release,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    ReplicaSpec,
    StepDone,
    StepFailed,
    StepResult,
    StepRow,
    Submit,
    Tick,
    Usage,
)
from scheduler.scheduler import Scheduler

log = logging.getLogger("lockstep.pool")

_ENDED_MAX = 4096
"""How many ended sessions of frontends are remembered."""
_FIGURES_MAX = 16
"""Of how many of them it is remembered what their requests had used."""
_LAST_WORDS_S = 0.2
"""How long a pool that has failed lives on, so that frontends hear of which event."""


class PoolActor:
    """Implements `PoolPort`. One event loop calls it; no method blocks."""

    def __init__(
        self,
        config: ClusterConfig,
        probe: Probe | None = None,
        leave: Callable[[], None] | None = None,
        abort: Callable[[], None] | None = None,
        meter: PoolMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`leave` ends the process for good when nobody has talked to the pool for `idle_exit_s`;
        `abort` ends it so that it is started anew, once an invariant is broken."""
        self._config = config.pool
        self._batches_max = config.scheduler.batches_in_flight_max
        self._scheduler = Scheduler(config.scheduler)
        self._probe = probe
        self._leave = leave
        self._abort = abort
        self._failed: tuple[str, ...] | None = None
        """The requests of the event that has broken this pool."""
        self._clock = clock
        self._incarnation = uuid.uuid4().hex[:12]
        self._started_s = self._heard_s = self._ticked_s = clock()
        self._replicas: dict[str, ReplicaPeer] = {}
        self._frontends: dict[str, FrontendPeer] = {}
        self._owners: dict[str, FrontendPeer] = {}
        """Which frontend a live request belongs to."""
        self._ended: dict[str, None] = {}
        """Sessions that were lost or have left, oldest first: their queues are gone, so one
        that still speaks must begin a new session."""
        self._figures: dict[str, dict[str, Usage]] = {}
        """What requests had used of sessions that were lost, oldest first."""
        self._touched: set[AckQueue[Any]] = set()
        self._stopping_until_s = -math.inf
        self._cut = False
        self._ticker: asyncio.Task[None] | None = None
        self._meter = meter or PoolMeter()

    # ------------------------------------------------------------------ workers

    async def join(self, replica_id: str, spec: ReplicaSpec, process: Any) -> JoinReply:
        """A new incarnation of a replica; `process` is what `probe` understands."""
        self._wake_up()
        if replica_id not in self._replicas:
            for other_id, other in self._replicas.items():
                if (other.spec.target, other.spec.dtype) != (spec.target, spec.dtype):
                    refused = (
                        f"it serves {spec.target} in {spec.dtype}, but {other_id} of this pool "
                        f"serves {other.spec.target} in {other.spec.dtype}"
                    )
                elif other.spec.fingerprint != spec.fingerprint:
                    refused = (
                        f"its weights or its arithmetic are not those of {other_id} of this pool:"
                        f" fingerprint {spec.fingerprint}, not {other.spec.fingerprint}"
                    )
                else:
                    continue
                log.error("replica %s is refused: %s", replica_id, refused)
                return JoinReply(self._incarnation, self._batches_max, refused)
            log.info("replica %s joins: %s blocks on %s", replica_id, spec.kv_blocks, spec.device)
            self._replicas[replica_id] = ReplicaPeer(spec, process, self._clock(), AckQueue())
            self._step(ReplicaJoined(replica_id, spec))
            self._wake_frontends()
        return JoinReply(self._incarnation, self._batches_max)

    async def pull(
        self,
        replica_id: str,
        acknowledged: int,
        results: Sequence[StepResult | FailureNote],
        wait_s: float,
    ) -> PullReply:
        """Takes results, gives what there is to do; waits up to `wait_s` when there is nothing."""
        self._wake_up()
        replica = self._replicas.get(replica_id)
        if replica is None:
            return PullReply(known=False)
        replica.heard_s = self._clock()
        replica.stream = calling_peer()
        for result in results:
            # A result comes again when the reply to its pull was lost.
            batch = replica.batches.pop(result.batch_id, None)
            if batch is None:
                continue
            if isinstance(result, StepResult):
                self._step(StepDone(result), batch=batch)
            else:
                failed = StepFailed(replica_id, result.batch_id, result.message)
                self._step(failed, batch=batch)
        if replica.draining and not replica.batches:
            wait_s = 0.0
        first, items = await replica.work.poll(acknowledged, min(wait_s, self._config.poll_s))
        replica.heard_s = self._clock()
        return PullReply(
            known=replica_id in self._replicas,
            number=first + len(items) - 1,
            items=tuple(items),
            first=first,
            draining=replica.draining and not replica.batches,
        )

    async def drain(self, replica_id: str) -> None:
        """No new sequence for this replica; its pulls tell it when it may go."""
        replica = self._replicas.get(replica_id)
        if replica is not None and not replica.draining:
            log.info("replica %s drains", replica_id)
            replica.draining = True
            self._step(ReplicaDraining(replica_id))
            replica.work.close()
            self._wake_frontends()

    async def leave(self, replica_id: str, blamed: bool = False) -> None:
        """The replica goes now; `blamed` if it hangs in the batch in hand, or broke in it."""
        self._lose_replica(replica_id, "hangs or is broken" if blamed else "has left", blamed)

    # ------------------------------------------------------------------ frontends

    async def submit(
        self,
        frontend_id: str,
        submits: Sequence[Submit],
        cancels: Sequence[str],
        unfinished: int = 0,
    ) -> SubmitReply:
        """New requests, and some to cancel; only the refused are in the reply."""
        if self._failed is not None:
            return SubmitReply(self._incarnation, failed=self._failed)
        self._wake_up()
        if frontend_id in self._ended:
            return SubmitReply(self._incarnation, known=False)
        frontend = self._frontend(frontend_id)
        frontend.unfinished = unfinished
        rejects: list[Reject] = []
        try:
            self._submit(frontend, submits, cancels, rejects)
        except PoolFailed:
            return SubmitReply(self._incarnation, failed=self._failed)
        return SubmitReply(
            self._incarnation, tuple(rejects), stopping=self._stopping, load=self._load()
        )

    def _submit(
        self,
        frontend: FrontendPeer,
        submits: Sequence[Submit],
        cancels: Sequence[str],
        rejects: list[Reject],
    ) -> None:
        for submit in submits:
            if self._stopping and not submit.accepted_before:
                refused = Reject(submit.request.id, RejectCode.STOPPING, "", STOPPING)
                rejects.append(refused)
                self._meter.rejected(refused)
                continue
            frontend.requests.add(submit.request.id)
            self._owners[submit.request.id] = frontend
            self._step(submit, rejects)
        for request_id in cancels:
            if request_id in frontend.requests:
                self._step(Cancel(request_id))

    async def updates(
        self, frontend_id: str, acknowledged: int, wait_s: float, unfinished: int = 0
    ) -> UpdatesReply:
        """One poll for all requests of a frontend; not polling is how a frontend is lost."""
        if self._failed is not None:
            return UpdatesReply(self._incarnation, known=True, failed=self._failed)
        self._wake_up()
        if frontend_id in self._ended:
            return UpdatesReply(self._incarnation, known=False)
        known = frontend_id in self._frontends
        frontend = self._frontend(frontend_id)
        frontend.unfinished = unfinished
        if not known:
            return UpdatesReply(
                self._incarnation, known=False, stopping=self._stopping, load=self._load()
            )
        first, items = await frontend.updates.poll(acknowledged, min(wait_s, self._config.poll_s))
        frontend.heard_s = self._clock()
        known = self._frontends.get(frontend_id) is frontend
        return UpdatesReply(
            incarnation=self._incarnation,
            known=known,
            number=first + len(items) - 1,
            items=tuple(items),
            first=first,
            stopping=self._stopping,
            cut=self._stopping and self._cut,
            load=self._load(),
            failed=self._failed,
        )

    async def part(self, frontend_id: str) -> PartReply:
        """The frontend will not ask again under this id; what it still had is cancelled.

        It may go on under another one, so it is told what its requests have used up to here.
        """
        self._lose_frontend(frontend_id, "has left")
        return PartReply(self._figures.pop(frontend_id, {}))

    async def status(self) -> PoolView:
        """The scheduler's snapshot and what the actor knows beside it."""
        self._wake_up()
        return PoolView(
            incarnation=self._incarnation,
            uptime_s=self._clock() - self._started_s,
            process_id=os.getpid(),
            status=self._scheduler.snapshot(),
            stopping=self._stopping,
        )

    # ------------------------------------------------------------------ stopping

    async def stop_accepting(self, for_s: float, cut: bool = False) -> StopReply:
        """Refuse new requests for `for_s` from now on; says what is unfinished.

        With `cut` the frontends end that, too. The limit heals a stop that never came to its end.
        """
        self._wake_up()
        news = cut and not self._cut if self._stopping else True
        self._stopping_until_s, self._cut = self._clock() + for_s, cut
        if news:
            log.info("no new request is accepted%s", ", the unfinished ones end" if cut else "")
            self._wake_frontends()
        # One that moves from shard to shard may be in none of them at the moment.
        told = sum(frontend.unfinished for frontend in self._frontends.values())
        age_s = self._clock() - self._started_s
        return StopReply(
            max(self._scheduler.snapshot().live, told), age_s > silence_s(self._config.poll_s)
        )

    @property
    def _stopping(self) -> bool:
        return self._clock() < self._stopping_until_s

    # ------------------------------------------------------------------ the crank

    def _step(
        self, event: Event, rejects: list[Reject] | None = None, batch: Batch | None = None
    ) -> None:
        """`batch`: the one that the event ends. Raises PoolFailed where an invariant is broken."""
        if self._failed is not None:
            raise PoolFailed("the pool has failed and ends")
        try:
            for action in self._scheduler.step(event, self._clock()):
                self._act(action, rejects)
        except Exception as error:
            self._fail(event, batch, error)
            raise PoolFailed("an invariant of the pool is broken") from error
        touched, self._touched = self._touched, set()
        for queue in touched:
            queue.settle()

    def _fail(self, event: object, batch: Batch | None, error: Exception) -> None:
        """Tell the frontends which event it was, and end: what is half-made must not go on."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        self._failed = requests = _requests_of(event, batch)
        # Neither the error's text nor a value: tokens may stand in them.
        log.critical(
            "the pool ends and is started anew: %s at %s:%s in %s of %s",
            *(type(error).__name__, frame.filename, frame.lineno, type(event).__name__),
            ", ".join(requests) or getattr(event, "replica_id", "no request"),
        )
        self._wake_frontends()
        if self._abort is not None:
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._abort)

    def _act(self, action: Action, rejects: list[Reject] | None) -> None:
        match action:
            case Dispatch(batch):
                if (replica := self._replicas.get(batch.replica_id)) is not None:
                    replica.batches[batch.id] = batch
                    self._post(replica.work, batch)
            case Interrupt(replica_id, batch_id):
                if (replica := self._replicas.get(replica_id)) is not None:
                    self._post(replica.work, InterruptNote(batch_id))
            case Release(replica_id, sequence_ids):
                if (replica := self._replicas.get(replica_id)) is not None:
                    self._post(replica.work, ReleaseNote(sequence_ids))
            case Emit(request_id, start, tokens):
                if (owner := self._owners.get(request_id)) is not None:
                    update = TokenUpdate(request_id, start, tokens)
                    self._post(owner.updates, update, urgent=start == 0)
                self._meter.committed(len(tokens))
            case RecordFailure(request_id, record):
                if (owner := self._owners.get(request_id)) is not None:
                    self._post(owner.updates, RecordNote(request_id, record))
            case Finish(request_id):
                if (owner := self._owners.pop(request_id, None)) is not None:
                    owner.requests.discard(request_id)
                    self._post(owner.updates, action)
                self._meter.finished(action)
            case Reject(request_id):
                if (owner := self._owners.pop(request_id, None)) is not None:
                    owner.requests.discard(request_id)
                if rejects is not None:
                    rejects.append(action)
                self._meter.rejected(action)

    def _post(self, queue: AckQueue[Any], item: Any, urgent: bool = True) -> None:
        queue.put(item, urgent)
        self._touched.add(queue)

    def _load(self) -> PoolLoad:
        serving = [peer.spec for peer in self._replicas.values() if not peer.draining]
        length_max = max((spec.length_max for spec in serving), default=0)
        return PoolLoad(len(serving), self._scheduler.outstanding_tokens, length_max)

    def _wake_frontends(self) -> None:
        """Their polls return at once: all of them should know what the replies say of the pool."""
        for frontend in self._frontends.values():
            frontend.updates.close()

    # ------------------------------------------------------------------ leases

    def _frontend(self, frontend_id: str) -> FrontendPeer:
        frontend = self._frontends.get(frontend_id)
        if frontend is None:
            frontend = FrontendPeer(self._clock(), AckQueue(self._config.gather_ms / 1000))
            self._frontends[frontend_id] = frontend
        frontend.heard_s = self._clock()
        return frontend

    def _wake_up(self) -> None:
        if self._failed is not None:
            raise PoolFailed("the pool has failed and ends")
        self._heard_s = self._clock()
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.tick_s)
            try:
                self.tick()
            except PoolFailed:
                return
            except Exception as error:
                self._fail(self, None, error)
                return

    def tick(self) -> None:
        """Enforces deadlines and leases; the actor calls it every `tick_s`."""
        now_s = self._clock()
        away_s, self._ticked_s = now_s - self._ticked_s, now_s
        if away_s > self._config.lease_s / 2:
            # This process stood still. What the others said meanwhile may be still unread.
            for replica in self._replicas.values():
                replica.heard_s = now_s
            for frontend in self._frontends.values():
                frontend.heard_s = now_s
        self._step(Tick())
        for replica_id, replica in list(self._replicas.items()):
            silent_s = 0.0 if replica.work.polled else now_s - replica.heard_s
            if silent_s > self._config.lease_s:
                # The network may be to blame, and then no request is; unless Ray, too, has no
                # answer from the process: then it is stuck, or dead and Ray does not know it yet.
                stuck = replica.is_stuck(now_s)
                self._lose_replica(replica_id, f"is silent for {silent_s:.1f} s", stuck)
            elif replica.is_dead(
                self._probe, now_s, self._config.probe_s, silent_s > self._config.lease_s / 2
            ):
                self._lose_replica(replica_id, "has died", blamed=True)
        for frontend_id, frontend in list(self._frontends.items()):
            silent_s = 0.0 if frontend.updates.polled else now_s - frontend.heard_s
            if silent_s > self._config.lease_s:
                self._lose_frontend(frontend_id, f"is silent for {silent_s:.1f} s")
        self._meter.observe(self._scheduler, now_s)
        idle = not self._replicas and not self._frontends
        if idle and self._leave and now_s - self._heard_s > self._config.idle_exit_s:
            log.info("nobody talks to the pool, it leaves")
            self._leave()

    def _lose_replica(self, replica_id: str, why: str, blamed: bool) -> None:
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        log.warning("replica %s %s", replica_id, why)
        replica.close()
        self._step(ReplicaLost(replica_id, blamed))
        self._wake_frontends()

    def _lose_frontend(self, frontend_id: str, why: str) -> None:
        self._ended[frontend_id] = None
        if len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        frontend = self._frontends.pop(frontend_id, None)
        if frontend is None:
            return
        lost = list(frontend.requests)
        log.warning("frontend %s %s; %d requests cancelled", frontend_id, why, len(lost))
        frontend.updates.close()
        for request_id in lost:
            self._step(Cancel(request_id))
        # Their ends, and earlier ones of which the frontend has not said that it knows them.
        ends = [item for item in frontend.updates.kept if isinstance(item, Finish)]
        self._figures[frontend_id] = {end.request_id: end.usage for end in ends}
        if len(self._figures) > _FIGURES_MAX:
            del self._figures[next(iter(self._figures))]


def _requests_of(event: object, batch: Batch | None) -> tuple[str, ...]:
    """The requests that an event is about."""
    if isinstance(event, Submit):
        return (event.request.id,)
    if isinstance(event, Cancel):
        return (event.request_id,)
    if batch is not None:
        rows: tuple[PrefillRow | StepRow, ...] = (*batch.prefill, *batch.rows)
        return tuple(row.sequence_id for row in rows)
    return ()
