"""What the pool, the workers and the frontends say to each other.

Each side talks to a `PoolPort`, in a cluster a `RayPool`. What comes with every batch goes over
streams, one for each membership of a worker and each session of a frontend: the scheduler's own
events and actions, and what is said beside them. The rest goes through Ray. Messages on a stream
arrive once and in order. With its stream a membership or a session ends, and the next one begins
with nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from msgspec.msgpack import Decoder

from cluster.metrics import Sum
from cluster.transport import Stream, StreamKind
from scheduler.errors import LockstepError
from scheduler.messages import (
    Batch,
    BatchKind,
    Cancel,
    Emit,
    Finish,
    Interrupt,
    Message,
    RecordFailure,
    Reject,
    Release,
    ReplicaSpec,
    StepFailed,
    StepResult,
    Submit,
)
from scheduler.scaling import ShardLoad, merged_status
from scheduler.status import PoolStatus

NAMESPACE = "lockstep"
"""Ray's namespace of the pools' actors."""
STOPPING = "the server is stopping"
"""What a client is told while no new request is admitted."""
REPLACED = "the only replica is being replaced; ask again"
"""The same where another one has no place beside it."""


class PoolUnreachable(LockstepError):
    """The pool did not answer, or it has a fault. What it knew may be gone."""


class PoolFailed(PoolUnreachable):
    """An invariant of the pool is broken: it answers nothing any more and its process ends."""


class Beat(Message, frozen=True):
    """The sender lives, whether or not it has anything else to say."""

    unfinished: int = 0
    """Of a frontend: its requests that have not ended, in all shards."""


# --------------------------------------------------------------------------- workers


class Successor(StrEnum):
    """When what takes a replica's place begins."""

    NONE = "none"
    """Nothing does, or it does not matter."""
    BEFORE = "before"
    """It serves already: in this pool, or in another that clients are being led to."""
    AFTER = "after"
    """Once this replica has gone."""


class DrainNote(Message, frozen=True):
    """From a worker: no new sequence, as soon as its pool can do without it. From the pool: it has
    nothing of this replica's any more."""

    successor: Successor = Successor.NONE


class LeaveNote(Message, frozen=True):
    """The replica goes now."""

    by_batch: bool = False
    """The batch in hand hangs or broke the replica, so its rows may be the reason."""


WorkerMessage = Batch | Release | Interrupt | DrainNote
WORKER = StreamKind(
    "Worker",
    calling=Decoder(list[StepResult | StepFailed | DrainNote | LeaveNote | Beat]),
    called=Decoder(list[WorkerMessage]),
)
"""The stream of one membership; its caller is the replica's id."""


# --------------------------------------------------------------------------- frontends


class Counted(Message, frozen=True):
    """What a frontend has counted since it said so last, to any pool."""

    sums: list[Sum]


class PoolState(Message, frozen=True):
    """What the pool says of itself, after all that it sends together."""

    load: ShardLoad
    stopping: bool = False
    """It admits no new request."""
    cut: bool = False
    """The grace time is over: whatever is unfinished will not be finished here."""
    failed: tuple[str, ...] | None = None
    """Its process ends; the requests of the event that has broken it."""


FrontendMessage = Emit | RecordFailure | Finish | Reject | PoolState
FRONTEND = StreamKind(
    "Frontend",
    calling=Decoder(list[Submit | Cancel | Beat | Counted]),
    called=Decoder(list[FrontendMessage]),
)
"""The stream of one session; its caller is the session's id."""


# --------------------------------------------------------------------------- rare calls


@dataclass(frozen=True, slots=True)
class StopReply:
    """What a pool that admits nothing new has still to wait for."""

    unfinished: int
    """Requests that have not ended, here or, by what the frontends said last, anywhere."""
    settled: bool
    """It is so old that frontends have told it all that an earlier incarnation had admitted."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """The scheduler's snapshot and what the actor knows beside it."""

    incarnation: str
    uptime_s: float
    status: PoolStatus
    stopping: bool = False
    name: str = ""
    """Where it is one of several: of its actor."""
    shards: tuple[PoolView, ...] = ()
    """Where it is several pools as one: each of them that answers."""
    silent: tuple[str, ...] = ()
    """Names of those that did not answer in time; nothing else here knows of them."""


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch that was answered; lengths and counts in tokens."""

    id: int
    replica_id: str
    kind: BatchKind
    rows: int
    steps: int
    shortest: int
    longest: int
    """Row at the beginning of a step batch; of a prefill the KV positions to be filled."""
    draft_len: int
    draft_tokens: int
    accepted_tokens: int
    committed_tokens: int
    """As the replica reports them; those of a prefill are the positions that it has filled."""
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request in flight."""

    id: str
    state: str
    replica_id: str
    """Empty while it waits."""
    prompt_tokens: int
    new_tokens: int
    new_tokens_max: int
    draft_tokens: int
    accepted_tokens: int
    age_s: float


@dataclass(frozen=True, slots=True)
class PoolOverview:
    """Its status, what was counted since its start, the last batches, and the oldest requests in
    flight."""

    view: PoolView
    sums: list[Sum]
    batches: tuple[BatchView, ...]
    requests: tuple[RequestView, ...]


def merged_view(shards: Sequence[PoolView], silent: Sequence[str] = ()) -> PoolView:
    """Several pools as one, as old as the youngest of them. `shards` must not be empty."""
    if len(shards) == 1 and not silent:
        return shards[0]
    return PoolView(
        incarnation="+".join(shard.incarnation for shard in shards),
        uptime_s=min(shard.uptime_s for shard in shards),
        status=merged_status([shard.status for shard in shards]),
        stopping=any(shard.stopping for shard in shards),
        shards=tuple(shards),
        silent=tuple(silent),
    )


class PoolPort(Protocol):
    """The pool as workers and frontends see it. Every call may raise `PoolUnreachable`."""

    async def join(self, replica_id: str, spec: ReplicaSpec, process: Any) -> str:
        """The replica is known from now on, and its worker opens a stream in its name; or else why
        it cannot be in this pool."""
        ...

    async def connect(self, kind: StreamKind, name: str) -> Stream:
        """A stream in the name of a replica that has joined, or of a new session."""
        ...

    async def status(self) -> PoolView: ...

    async def overview(self) -> PoolOverview: ...
