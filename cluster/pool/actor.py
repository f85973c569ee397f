"""The pool as an actor: drives the pure Scheduler and passes its actions on. Knows no Ray.

Replicas pull their batches, ingresses poll for news; both are mailboxes that survive lost replies.
Whoever is silent for longer than the lease is lost: a replica's residents wait again, an ingress's
requests are cancelled. Nothing here needs to outlive the process: a new incarnation is told
everything again by those who talk to it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from cluster.config import ClusterConfig
from cluster.frontend.metrics import PoolMeter
from cluster.pool.ack_queue import Mailbox
from cluster.pool.peers import IngressPeer, Probe, ReplicaPeer
from cluster.pool.protocol import (
    STOPPING,
    JoinReply,
    NewsReply,
    PartReply,
    PoolLoad,
    PoolView,
    PullReply,
    ReleaseNote,
    StopReply,
    SubmitReply,
    silence_s,
)
from cluster.transport.line import connection
from scheduler.messages import (
    Action,
    Cancel,
    Dispatch,
    Emit,
    Event,
    Finish,
    Interrupt,
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
    Submit,
    Tick,
    Usage,
)
from scheduler.scheduler import Scheduler

log = logging.getLogger("lockstep.pool")

_ENDED_MAX = 4096
"""How many ended sessions of ingresses are remembered."""
_FIGURES_MAX = 16
"""Of how many of them it is remembered what their requests had used."""


class PoolActor:
    """Implements `PoolPort`. One event loop calls it; no method blocks."""

    def __init__(
        self,
        config: ClusterConfig,
        probe: Probe | None = None,
        leave: Callable[[], None] | None = None,
        meter: PoolMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`leave` ends the process when nobody has talked to the pool for `idle_exit_s`."""
        self._config = config.pool
        self._batches_max = config.scheduler.batches_in_flight_max
        self._scheduler = Scheduler(config.scheduler)
        self._probe = probe
        self._leave = leave
        self._clock = clock
        self._incarnation = uuid.uuid4().hex[:12]
        self._started_s = self._heard_s = self._ticked_s = clock()
        self._replicas: dict[str, ReplicaPeer] = {}
        self._ingresses: dict[str, IngressPeer] = {}
        self._owners: dict[str, IngressPeer] = {}
        """Which ingress a live request belongs to."""
        self._ended: dict[str, None] = {}
        """Sessions that were lost or have left, oldest first: their mailboxes are gone, so one
        that still speaks must begin a new session."""
        self._figures: dict[str, dict[str, Usage]] = {}
        """What requests had used of sessions that were lost, oldest first."""
        self._touched: set[Mailbox[Any]] = set()
        self._stopping_until_s = -math.inf
        self._cut = False
        self._ticker: asyncio.Task[None] | None = None
        self._meter = meter or PoolMeter()

    # ------------------------------------------------------------------ replicas

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
            self._replicas[replica_id] = ReplicaPeer(spec, process, self._clock(), Mailbox())
            self._step(ReplicaJoined(replica_id, spec))
            self._wake_ingresses()
        return JoinReply(self._incarnation, self._batches_max)

    async def pull(
        self,
        replica_id: str,
        acknowledged: int,
        results: Sequence[StepResult | StepFailed],
        wait_s: float,
    ) -> PullReply:
        """Takes results, gives what there is to do; waits up to `wait_s` when there is nothing."""
        self._wake_up()
        replica = self._replicas.get(replica_id)
        if replica is None:
            return PullReply(known=False)
        replica.heard_s = self._clock()
        replica.connection = connection()
        for result in results:
            # A result comes again when the reply to its pull was lost.
            if result.batch_id in replica.batches:
                replica.batches.discard(result.batch_id)
                self._step(StepDone(result) if isinstance(result, StepResult) else result)
        if replica.draining and not replica.batches:
            wait_s = 0.0
        first, items = await replica.mailbox.poll(acknowledged, min(wait_s, self._config.poll_s))
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
            replica.mailbox.close()
            self._wake_ingresses()

    async def leave(self, replica_id: str, blamed: bool = False) -> None:
        """The replica goes now; `blamed` if it hangs in the batch in hand, or broke in it."""
        self._lose_replica(replica_id, "hangs or is broken" if blamed else "has left", blamed)

    # ------------------------------------------------------------------ ingresses

    async def submit(
        self,
        ingress_id: str,
        submits: Sequence[Submit],
        cancels: Sequence[str],
        unfinished: int = 0,
    ) -> SubmitReply:
        """New requests, and some to cancel; only the refused are in the reply."""
        self._wake_up()
        if ingress_id in self._ended:
            return SubmitReply(self._incarnation, known=False)
        ingress = self._ingress(ingress_id)
        ingress.unfinished = unfinished
        rejects: list[Reject] = []
        for submit in submits:
            if self._stopping and not submit.accepted_before:
                refused = Reject(submit.request.id, RejectCode.STOPPING, "", STOPPING)
                rejects.append(refused)
                self._meter.rejected(refused)
                continue
            ingress.requests.add(submit.request.id)
            self._owners[submit.request.id] = ingress
            self._step(submit, rejects)
        for request_id in cancels:
            if request_id in ingress.requests:
                self._step(Cancel(request_id))
        return SubmitReply(
            self._incarnation, tuple(rejects), stopping=self._stopping, load=self._load()
        )

    async def news(
        self, ingress_id: str, acknowledged: int, wait_s: float, unfinished: int = 0
    ) -> NewsReply:
        """One poll for all requests of an ingress; not polling is how an ingress is lost."""
        self._wake_up()
        if ingress_id in self._ended:
            return NewsReply(self._incarnation, known=False)
        known = ingress_id in self._ingresses
        ingress = self._ingress(ingress_id)
        ingress.unfinished = unfinished
        if not known:
            return NewsReply(
                self._incarnation, known=False, stopping=self._stopping, load=self._load()
            )
        first, items = await ingress.mailbox.poll(acknowledged, min(wait_s, self._config.poll_s))
        ingress.heard_s = self._clock()
        known = self._ingresses.get(ingress_id) is ingress
        return NewsReply(
            incarnation=self._incarnation,
            known=known,
            number=first + len(items) - 1,
            items=tuple(items),
            first=first,
            stopping=self._stopping,
            cut=self._stopping and self._cut,
            load=self._load(),
        )

    async def part(self, ingress_id: str) -> PartReply:
        """The ingress will not ask again under this id; what it still had is cancelled.

        It may go on under another one, so it is told what its requests have used up to here.
        """
        self._lose_ingress(ingress_id, "has left")
        return PartReply(self._figures.pop(ingress_id, {}))

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

        With `cut` the ingresses end that, too. The limit heals a stop that never came to its end.
        """
        self._wake_up()
        news = cut and not self._cut if self._stopping else True
        self._stopping_until_s, self._cut = self._clock() + for_s, cut
        if news:
            log.info("no new request is accepted%s", ", the unfinished ones end" if cut else "")
            self._wake_ingresses()
        # One that moves from shard to shard may be in none of them at the moment.
        told = sum(ingress.unfinished for ingress in self._ingresses.values())
        age_s = self._clock() - self._started_s
        return StopReply(
            max(self._scheduler.snapshot().live, told), age_s > silence_s(self._config.poll_s)
        )

    @property
    def _stopping(self) -> bool:
        return self._clock() < self._stopping_until_s

    # ------------------------------------------------------------------ the crank

    def _step(self, event: Event, rejects: list[Reject] | None = None) -> None:
        for action in self._scheduler.step(event, self._clock()):
            self._act(action, rejects)
        touched, self._touched = self._touched, set()
        for mailbox in touched:
            mailbox.settle()

    def _act(self, action: Action, rejects: list[Reject] | None) -> None:
        match action:
            case Dispatch(batch):
                if (replica := self._replicas.get(batch.replica_id)) is not None:
                    replica.batches.add(batch.id)
                    self._post(replica.mailbox, batch)
            case Interrupt(replica_id):
                if (replica := self._replicas.get(replica_id)) is not None:
                    self._post(replica.mailbox, action)
            case Release(replica_id, sequence_ids):
                if (replica := self._replicas.get(replica_id)) is not None:
                    self._post(replica.mailbox, ReleaseNote(sequence_ids))
            case Emit(request_id, start, tokens):
                if (owner := self._owners.get(request_id)) is not None:
                    self._post(owner.mailbox, (request_id, start, tokens), urgent=start == 0)
                self._meter.committed(len(tokens))
            case RecordFailure(request_id):
                if (owner := self._owners.get(request_id)) is not None:
                    self._post(owner.mailbox, action)
            case Finish(request_id):
                if (owner := self._owners.pop(request_id, None)) is not None:
                    owner.requests.discard(request_id)
                    self._post(owner.mailbox, action)
                self._meter.finished(action)
            case Reject(request_id):
                if (owner := self._owners.pop(request_id, None)) is not None:
                    owner.requests.discard(request_id)
                if rejects is not None:
                    rejects.append(action)
                self._meter.rejected(action)

    def _post(self, mailbox: Mailbox[Any], item: Any, urgent: bool = True) -> None:
        mailbox.put(item, urgent)
        self._touched.add(mailbox)

    def _load(self) -> PoolLoad:
        serving = [peer.spec for peer in self._replicas.values() if not peer.draining]
        length_max = max((spec.length_max for spec in serving), default=0)
        return PoolLoad(len(serving), self._scheduler.outstanding_tokens, length_max)

    def _wake_ingresses(self) -> None:
        """Their polls return at once: all of them should know what the replies say of the pool."""
        for ingress in self._ingresses.values():
            ingress.mailbox.close()

    # ------------------------------------------------------------------ leases

    def _ingress(self, ingress_id: str) -> IngressPeer:
        ingress = self._ingresses.get(ingress_id)
        if ingress is None:
            ingress = IngressPeer(self._clock(), Mailbox(self._config.gather_ms / 1000))
            self._ingresses[ingress_id] = ingress
        ingress.heard_s = self._clock()
        return ingress

    def _wake_up(self) -> None:
        self._heard_s = self._clock()
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.tick_s)
            try:
                self.tick()
            except Exception:
                # The crank must go on turning; a broken invariant shows in the log and in tests.
                log.exception("tick failed")

    def tick(self) -> None:
        """Enforces deadlines and leases; the actor calls it every `tick_s`."""
        now_s = self._clock()
        away_s, self._ticked_s = now_s - self._ticked_s, now_s
        if away_s > self._config.lease_s / 2:
            # This process stood still. What the others said meanwhile may be still unread.
            for replica in self._replicas.values():
                replica.heard_s = now_s
            for ingress in self._ingresses.values():
                ingress.heard_s = now_s
        self._step(Tick())
        for replica_id, replica in list(self._replicas.items()):
            silent_s = 0.0 if replica.mailbox.polled else now_s - replica.heard_s
            if silent_s > self._config.lease_s:
                # The network may be to blame, and then no request is; unless Ray, too, has no
                # answer from the process: then it is stuck, or dead and Ray does not know it yet.
                stuck = replica.is_stuck(now_s)
                self._lose_replica(replica_id, f"is silent for {silent_s:.1f} s", stuck)
            elif replica.is_dead(
                self._probe, now_s, self._config.probe_s, silent_s > self._config.lease_s / 2
            ):
                self._lose_replica(replica_id, "has died", blamed=True)
        for ingress_id, ingress in list(self._ingresses.items()):
            silent_s = 0.0 if ingress.mailbox.polled else now_s - ingress.heard_s
            if silent_s > self._config.lease_s:
                self._lose_ingress(ingress_id, f"is silent for {silent_s:.1f} s")
        self._meter.observe(self._scheduler, now_s)
        idle = not self._replicas and not self._ingresses
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
        self._wake_ingresses()

    def _lose_ingress(self, ingress_id: str, why: str) -> None:
        self._ended[ingress_id] = None
        if len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        ingress = self._ingresses.pop(ingress_id, None)
        if ingress is None:
            return
        lost = list(ingress.requests)
        log.warning("ingress %s %s; %d requests cancelled", ingress_id, why, len(lost))
        ingress.mailbox.close()
        for request_id in lost:
            self._step(Cancel(request_id))
        # Their ends, and earlier ones of which the ingress has not said that it knows them.
        ends = [item for item in ingress.mailbox.kept if isinstance(item, Finish)]
        self._figures[ingress_id] = {end.request_id: end.usage for end in ends}
        if len(self._figures) > _FIGURES_MAX:
            del self._figures[next(iter(self._figures))]
