"""What the pool, the workers and the frontends say to each other.

Each side talks to a `PoolPort`: in a cluster a `RayPool`, in unit tests the `PoolActor` itself.
Calls that come with every batch (`SIGNATURES`) go over the transport, so their messages are typed;
the others go through Ray. Everything is safe to repeat: items carry a rising number that the reader
acknowledges with its next call, so a lost reply loses nothing and a repeated one is recognised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from cluster.transport.codec import Signature
from scheduler.errors import LockstepError
from scheduler.messages import (
    Batch,
    FailureRecord,
    Finish,
    Reject,
    ReplicaSpec,
    StepResult,
    Submit,
    Usage,
)
from scheduler.scaling import merged_status
from scheduler.status import PoolStatus

STOPPING = "the server is stopping"
"""What a client is told while no new request is accepted."""


def silence_s(poll_s: float) -> float:
    """How long a pool or a frontend that polls every `poll_s` may be silent and be thought well."""
    return 2 * poll_s + 1.0


class PoolUnreachable(LockstepError):
    """The pool did not answer, or it has a fault. What it knew may be gone."""


class PoolFailed(PoolUnreachable):
    """An invariant of the pool is broken: it answers nothing any more and its process ends."""


# --------------------------------------------------------------------------- workers


@dataclass(frozen=True, slots=True)
class JoinReply:
    """`replica_id` is known from now on; no pull is needed while it holds that many batches."""

    incarnation: str
    batches_in_flight_max: int
    refused: str = ""
    """Why the replica cannot be in this pool; it is not known then."""


class ReleaseNote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Free the blocks of these sequences, after the batches that came before."""

    sequence_ids: tuple[str, ...]


class InterruptNote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the batch with this id, and earlier ones, after the step in hand."""

    batch_id: int


class FailureNote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The replica lives but could not run the batch."""

    batch_id: int
    message: str


class PullReply(msgspec.Struct, frozen=True, array_like=True):
    """What a replica has to do next; with `known` false it must join again under a new id."""

    known: bool
    number: int = 0
    """Of the last item; the next pull acknowledges it."""
    items: tuple[Batch | ReleaseNote | InterruptNote, ...] = ()
    first: int = 0
    """Number of the first item; items up to the last one acknowledged were seen before."""
    draining: bool = False
    """The pool has nothing of this replica's any more; it may go."""


# --------------------------------------------------------------------------- frontends


class TokenUpdate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """New tokens of a request; `start` is the index of the first among its new tokens."""

    request_id: str
    start: int
    tokens: tuple[int, ...]


class RecordNote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What counts against a request from now on; it goes with the request to another pool."""

    request_id: str
    record: FailureRecord


Update = TokenUpdate | RecordNote | Finish


class PoolLoad(msgspec.Struct, frozen=True, array_like=True):
    """How much there is to do in a pool, for a frontend that has several to choose from."""

    serving: int = 0
    """Replicas that take sequences."""
    outstanding_tokens: int = 0
    """Tokens that accepted requests may still commit."""
    length_max: int = 0
    """Longest content (prompt + new tokens) that one of these replicas can hold."""


class SubmitReply(msgspec.Struct, frozen=True, array_like=True):
    """With `known` false the pool has ended this frontend's session and has accepted nothing."""

    incarnation: str
    rejects: tuple[Reject, ...] = ()
    known: bool = True
    stopping: bool = False
    """The pool accepts no new request."""
    load: PoolLoad = PoolLoad()
    """With the requests of this call."""
    failed: tuple[str, ...] | None = None
    """The pool's process ends; the requests of the event that has broken it."""


class UpdatesReply(msgspec.Struct, frozen=True, array_like=True):
    """What happened to a frontend's requests; with `known` false the pool holds none of them."""

    incarnation: str
    known: bool
    number: int = 0
    items: tuple[Update, ...] = ()
    first: int = 0
    stopping: bool = False
    """The pool accepts no new request."""
    cut: bool = False
    """The grace time is over: whatever is unfinished will not be finished here."""
    load: PoolLoad = PoolLoad()
    failed: tuple[str, ...] | None = None
    """As in `SubmitReply`."""


SIGNATURES: Mapping[str, Signature] = {
    "pull": Signature(tuple[str, int, tuple[StepResult | FailureNote, ...], float], PullReply),
    "submit": Signature(tuple[str, tuple[Submit, ...], tuple[str, ...], int], SubmitReply),
    "updates": Signature(tuple[str, int, float, int], UpdatesReply),
}
"""Arguments and reply of each call that goes over the transport."""


# --------------------------------------------------------------------------- rare calls


@dataclass(frozen=True, slots=True)
class PartReply:
    """What a frontend is told of a session that it has left."""

    used: Mapping[str, Usage] = field(default_factory=dict)
    """What requests had used that it had not been told the end of, by their ids; less where the
    session had ended long before."""


@dataclass(frozen=True, slots=True)
class StopReply:
    """What a pool that accepts nothing new has still to wait for."""

    unfinished: int
    """Requests that have not ended, here or, by what the frontends said last, anywhere."""
    settled: bool
    """It is so old that frontends have told it all that an earlier incarnation had accepted."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """The scheduler's snapshot and what the actor knows beside it."""

    incarnation: str
    uptime_s: float
    process_id: int
    status: PoolStatus
    stopping: bool = False
    name: str = ""
    """Where it is one of several: of its actor."""
    shards: tuple[PoolView, ...] = ()
    """Where it is several pools as one: each of them that answers."""
    silent: tuple[str, ...] = ()
    """Names of those that did not answer in time; nothing else here knows of them."""


def merged_view(shards: Sequence[PoolView], silent: Sequence[str] = ()) -> PoolView:
    """Several pools as one, as old as the youngest of them. `shards` must not be empty."""
    if len(shards) == 1 and not silent:
        return shards[0]
    return PoolView(
        incarnation="+".join(shard.incarnation for shard in shards),
        uptime_s=min(shard.uptime_s for shard in shards),
        process_id=shards[0].process_id,
        status=merged_status([shard.status for shard in shards]),
        stopping=any(shard.stopping for shard in shards),
        shards=tuple(shards),
        silent=tuple(silent),
    )


class PoolPort(Protocol):
    """The pool as workers and frontends see it. Every call may raise `PoolUnreachable`."""

    async def join(self, replica_id: str, spec: ReplicaSpec, process: Any) -> JoinReply: ...

    async def pull(
        self,
        replica_id: str,
        acknowledged: int,
        results: Sequence[StepResult | FailureNote],
        wait_s: float,
    ) -> PullReply: ...

    async def drain(self, replica_id: str) -> None: ...

    async def leave(self, replica_id: str, blamed: bool = False) -> None:
        """`blamed`: the batch in hand hangs or broke the replica, so it may be to blame."""
        ...

    async def submit(
        self,
        frontend_id: str,
        submits: Sequence[Submit],
        cancels: Sequence[str],
        unfinished: int = 0,
    ) -> SubmitReply:
        """`unfinished`: requests of the whole frontend that have not ended, in all shards."""
        ...

    async def updates(
        self, frontend_id: str, acknowledged: int, wait_s: float, unfinished: int = 0
    ) -> UpdatesReply: ...

    async def part(self, frontend_id: str) -> PartReply: ...

    async def status(self) -> PoolView: ...

    async def stop_accepting(self, for_s: float, cut: bool = False) -> StopReply: ...
