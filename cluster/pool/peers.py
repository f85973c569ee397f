"""What the pool's actor remembers of workers and frontends, and which messages go to which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.metrics import PoolMeter
from cluster.pool.protocol import (
    DrainNote,
    FrontendMessage,
    PoolPort,
    PoolState,
    Successor,
    WorkerMessage,
)
from cluster.transport import Stream
from scheduler.messages import (
    Action,
    Batch,
    Cancel,
    Dispatch,
    Emit,
    Finish,
    Interrupt,
    RecordFailure,
    Reject,
    Release,
    ReplicaSpec,
    Submit,
)
from scheduler.scaling import ShardLoad
from scheduler.scheduler import Scheduler

_ELSEWHERE_S = 2.0
"""How long the pools of other shards may take to say which replicas they have."""
GATHER_S = 0.025
"""How long token updates that are not urgent may wait for more of them."""


@dataclass(slots=True, eq=False)
class WorkerPeer:
    """One membership of a replica."""

    spec: ReplicaSpec
    process: Any
    """What the pool's probe understands."""
    heard_s: float
    batches: dict[int, Batch] = field(default_factory=dict)
    """Dispatched and not answered."""
    successor: Successor | None = None
    """Of a replica that wants to go."""
    going_s: float = 0.0
    """Since when it does."""
    held: bool = False
    """It stays, since no other one is there."""
    draining: bool = False
    stream: Stream | None = None
    """None until its worker has opened it."""
    _waiting: list[WorkerMessage] = field(default_factory=list)
    """What came before the stream, or is of the event in hand."""

    def post(self, message: WorkerMessage) -> None:
        self._waiting.append(message)

    def flush_within(self, _within_s: float) -> None:
        """Send what waits now: no worker is to wait for anything."""
        if self.stream is not None and self._waiting:
            waiting, self._waiting = self._waiting, []
            self.stream.send(*waiting)

    def hand_over(self) -> None:
        """Tell a replica that drains, once nothing of it is waited for."""
        if self.draining and not self.batches:
            self.post(DrainNote())
            self.flush_within(0.0)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.end()


@dataclass(slots=True, eq=False)
class FrontendPeer:
    """One session of a frontend."""

    stream: Stream
    heard_s: float
    state: Callable[[], PoolState]
    """What the pool says of itself."""
    requests: set[str] = field(default_factory=set)
    """Live ones."""
    unfinished: int = 0
    """Requests of its process that have not ended, in all shards, as it said last."""
    _waiting: list[FrontendMessage] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None

    def post(self, message: FrontendMessage) -> None:
        self._waiting.append(message)

    def flush_within(self, within_s: float) -> None:
        """Send what waits, together with what comes until then."""
        if within_s <= 0:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(within_s, self.flush)

    def flush_soon(self) -> None:
        """Nothing urgent waits."""
        self.flush_within(GATHER_S)

    def flush(self) -> None:
        """Send what waits and the pool's state now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        self.stream.send(*waiting, self.state())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.stream.end()


def deliver(
    actions: Iterable[Action],
    workers: Mapping[str, WorkerPeer],
    owners: dict[str, FrontendPeer],
    meter: PoolMeter,
) -> None:
    """Send each to the peer that it concerns; what concerns one that is gone is dropped.

    `owners`: the frontends, by their live requests.
    """
    due: dict[WorkerPeer | FrontendPeer, float] = {}
    for action in actions:
        peer: WorkerPeer | FrontendPeer | None = None
        message: Any = action
        within_s = 0.0
        match action:
            case Dispatch(batch):
                message = batch
                if (peer := workers.get(batch.replica_id)) is not None:
                    peer.batches[batch.id] = batch
            case Interrupt(replica_id) | Release(replica_id):
                peer = workers.get(replica_id)
            case Emit(request_id, start, tokens):
                meter.committed(len(tokens))
                peer = owners.get(request_id)
                # Only the first token of a request is waited for by itself.
                within_s = GATHER_S if start else 0.0
            case RecordFailure(request_id):
                peer = owners.get(request_id)
            case Finish(request_id) | Reject(request_id):
                if isinstance(action, Finish):
                    meter.finished(action)
                if (peer := owners.pop(request_id, None)) is not None:
                    peer.requests.discard(request_id)
        if peer is not None:
            peer.post(message)
            due[peer] = min(within_s, due.get(peer, within_s))
    # Workers first: a replica may have nothing to do until then.
    for peer in sorted(due, key=lambda peer: isinstance(peer, FrontendPeer)):
        peer.flush_within(due[peer])


def load_of(workers: Mapping[str, WorkerPeer], scheduler: Scheduler, none: bool) -> ShardLoad:
    """What frontends are told of the pool's load; with `none` no replica takes requests."""
    serving = [peer.spec for peer in workers.values() if not (none or peer.draining)]
    books = scheduler.pool
    return ShardLoad(
        serving=len(serving),
        outstanding_tokens=books.outstanding_tokens,
        length_max=max((spec.length_max for spec in serving), default=0),
        expected_share=books.expected_share,
    )


def incompatible(spec: ReplicaSpec, others: Mapping[str, ReplicaSpec]) -> str:
    """Why a replica's output may differ from that of one of these; empty if it does not."""
    for other_id, other in others.items():
        if (other.target, other.dtype) != (spec.target, spec.dtype):
            return (
                f"it serves {spec.target} in {spec.dtype}, but {other_id} "
                f"serves {other.target} in {other.dtype}"
            )
        if other.fingerprint != spec.fingerprint:
            return (
                f"its weights or its arithmetic are not those of {other_id}:"
                f" fingerprint {spec.fingerprint} ({spec.arithmetic}), not {other.fingerprint}"
                f" ({other.arithmetic})"
            )
    return ""


async def unlike_elsewhere(spec: ReplicaSpec, pools: Iterable[PoolPort]) -> str:
    """Why its output may differ from that of a replica of these pools, to which requests may move;
    empty if it does not, as far as they answer in time."""
    asked = [asyncio.ensure_future(pool.status()) for pool in pools]
    done, late = await asyncio.wait(asked, timeout=_ELSEWHERE_S) if asked else (set(), set())
    for call in late:
        call.cancel()
    views = [call.result() for call in done if call.exception() is None]
    specs = {replica.id: replica.spec for view in views for replica in view.status.replicas}
    return incompatible(spec, specs)


def requests_of(event: object, batch: Batch | None) -> tuple[str, ...]:
    """The requests that an event is about."""
    if isinstance(event, Submit):
        return (event.request.id,)
    if isinstance(event, Cancel):
        return (event.request_id,)
    return tuple(batch.row_ids) if batch is not None else ()
