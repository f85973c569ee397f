"""Everything that crosses the scheduler's door: events in, actions out, and what they carry.

All are frozen and without behaviour, so that Ray, the in-process engine and the simulator speak one
language. Token ids are plain ints, lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from scheduler.decoding import TokenLogprobs
from scheduler.requests import (
    Batch,
    BatchKind,
    KvGroups,
    PrefillRow,
    Priority,
    ReplicaSpec,
    Request,
    RowFailure,
    RowResult,
    Sampling,
    StepResult,
    StepRow,
    StepTimes,
    TriedBatch,
    blocks_taken,
)


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What also travels between processes, as it is: in a union each is told by its name."""


# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """What counts against a request; `faults` says when. It goes along to another pool."""

    failures: int = 0
    """In a row without a new token: batches with it alone that failed, and replicas that died."""
    deaths: int = 0
    """Replicas that died with it in flight, ever."""
    kills: int = 0
    """Those of them that died with nothing else in flight."""
    rows_limit: int | None = None
    """In quarantine: it runs in batches of at most so many rows, of rows in quarantine only, with
    nothing else in flight on the replica. None: it runs as all others do."""
    broke_at: int = 0
    """Content that is longer [tokens] clears it of failures."""
    quarantined_until: int = 0
    """Content that is longer [tokens] ends the quarantine, too; at least `broke_at`."""

    def at(self, length: int) -> FailureRecord:
        """The record once the content has so many tokens."""
        if length <= self.broke_at:
            return self
        limit = self.rows_limit if length <= self.quarantined_until else None
        return replace(self, failures=0, rows_limit=limit)


class Submit(Message, frozen=True):
    request: Request
    admitted_before: bool = False
    """Another pool, or this one before a restart, was sent it: it is not refused for load."""
    validated: bool = False
    """Such a pool admitted it and knew replicas, so one can serve it. Which ones come back first
    after a restart is chance: it waits for one like those. Never a client's to say."""
    record: FailureRecord = FailureRecord()
    """What that pool has found out about it. Never a client's to say."""


class Cancel(Message, frozen=True):
    """The client is gone, or the frontend found a stop string. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ReplicaJoined:
    """A new incarnation; its id was never seen before."""

    replica_id: str
    spec: ReplicaSpec


@dataclass(frozen=True, slots=True)
class ReplicaDraining:
    """Gets no new sequence; its residents move to waiting once no batch holds them."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """All its residents wait again, with the tokens that they have committed."""

    replica_id: str
    by_batch: bool
    """Whether a batch in flight may have killed it; not so when it has left by itself."""


@dataclass(frozen=True, slots=True)
class StepDone:
    result: StepResult


class StepFailed(Message, frozen=True):
    """The replica is sound but could not run the batch: it is too large, or a row of it breaks it.

    The rows of a speculate batch are as they were before it, those of a prefill are not there.
    """

    replica_id: str
    batch_id: int
    message: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes: deadlines are enforced."""


Event = (
    Submit | Cancel | ReplicaJoined | ReplicaDraining | ReplicaLost | StepDone | StepFailed | Tick
)

# --------------------------------------------------------------------------- actions


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token was committed (or, set by the frontend, a stop string was found)."""
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost and how speculation went."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt: tokens whose KV its first replica had already, of an earlier request."""
    steps: int = 0
    draft_tokens: int = 0
    """Draft and accepted tokens are as replicas report them: where a result was cut at a stop
    token or the limit they cover tokens that were dropped. completion_tokens never does."""
    accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    replicas: tuple[str, ...] = ()
    """Replicas that served it, in order of first use."""
    recovered: int = 0
    """How often it lost its place and was prefilled again: its replica was lost or drained, a
    batch with it failed, it was moved to a lighter replica, or KV blocks ran out."""
    queued_s: float = 0.0
    """Seconds in the queue until a replica first took it."""
    drafts: int = 0
    """Steps in which draft tokens were asked for."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    batch: Batch


class Emit(Message, frozen=True):
    """New tokens of a request; `start` is the index of the first among its new tokens."""

    request_id: str
    start: int
    tokens: tuple[int, ...]
    extras: tuple[TokenLogprobs, ...] = ()
    """What the request wants to be told of each of the tokens. With no tokens: of the prompt, from
    the token at index `start` + 1 on; after a loss they may come again."""
    accepted: tuple[int, ...] = ()
    """As in `RowResult`; the last steps may be beyond the tokens."""


class RecordFailure(Message, frozen=True):
    """A batch or a replica broke with this live request: the record goes along to another pool."""

    request_id: str
    record: FailureRecord


class Finish(Message, frozen=True):
    """The last word on an admitted request; comes exactly once."""

    request_id: str
    reason: FinishReason
    usage: Usage = Usage()
    message: str = ""
    field: str = ""
    """Of a request that has FAILED: its field that is at fault, if one is."""


class RejectCode(StrEnum):
    INVALID = "invalid"
    OVERLOADED = "overloaded"
    DUPLICATE = "duplicate"
    STOPPING = "stopping"
    """Said by the process that drives the scheduler, never by the scheduler itself."""


class Reject(Message, frozen=True):
    """A request that never entered the pool; `field` names what is wrong with it."""

    request_id: str
    code: RejectCode
    field: str
    message: str
    retry_after_s: float = 0.0
    """When the same request may be admitted, as estimated; for OVERLOADED."""


class Interrupt(Message, frozen=True):
    """End this batch after the step in hand: other rows wait for it, or a row of it has ended.

    Only a wish: a batch that goes on is right all the same.
    """

    replica_id: str
    batch_id: int


class Release(Message, frozen=True):
    """The replica frees the blocks of these sequences, after the batches it already has.

    No batch in flight holds them. An id that it does not hold (its prefill failed) is ignored.
    """

    replica_id: str
    sequence_ids: tuple[str, ...]


Action = Dispatch | Interrupt | Emit | RecordFailure | Finish | Reject | Release
