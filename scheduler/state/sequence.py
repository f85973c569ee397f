"""One request's tokens and where they stand; every legal state change is in one table here.

A sequence's content is its prompt followed by its committed tokens. While it is a resident, the
replica holds valid KV for all of the content but the last token, so a prefill commits nothing and
every step commits one token per row or more. This file knows nothing of replicas or batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from math import inf
from typing import Final

from scheduler.messages import FailureRecord, FinishReason, Request, RowResult, StepResult, Usage
from scheduler.state.prefixes import BlockKey, block_keys


class State(StrEnum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """In the queue, on no replica."""
    PREFILLING = "prefilling"
    """In a prefill batch in flight; its blocks are reserved."""
    PARTIAL = "partial"
    """A resident between two prefill batches, filled in part; no batch in flight holds it."""
    READY = "ready"
    """A resident, filled, that no batch in flight holds."""
    STEPPING = "stepping"
    """A resident in a speculate batch in flight."""
    LEAVING = "leaving"
    """Its Finish is out, but a batch in flight still holds its row and so its blocks."""
    FINISHED = "finished"
    """Gone: nothing changes it any more."""


class Move(StrEnum):
    """What can happen to a sequence."""

    PREFILL = "prefill"
    """A prefill batch with its row is dispatched."""
    CHUNK = "chunk"
    """That batch is done, and there is more to fill."""
    PREFILLED = "prefilled"
    """That batch is done, and with it the prefill."""
    STEP = "step"
    """A speculate batch with its row is dispatched."""
    STEPPED = "stepped"
    """That batch is done."""
    RETURN = "return"
    """It lost its place: its replica was lost or drains, its batch failed, it is moved to a lighter
    replica, or KV blocks ran out."""
    FINISH = "finish"
    """Its Finish goes out."""
    LET_GO = "let go"
    """The batch that held a leaving row has ended."""


LEGAL: Final = {
    (State.WAITING, Move.PREFILL): State.PREFILLING,
    (State.PREFILLING, Move.CHUNK): State.PARTIAL,
    (State.PARTIAL, Move.PREFILL): State.PREFILLING,
    (State.PREFILLING, Move.PREFILLED): State.READY,
    (State.READY, Move.STEP): State.STEPPING,
    (State.STEPPING, Move.STEPPED): State.READY,
    (State.PREFILLING, Move.RETURN): State.WAITING,
    (State.PARTIAL, Move.RETURN): State.WAITING,
    (State.READY, Move.RETURN): State.WAITING,
    (State.STEPPING, Move.RETURN): State.WAITING,
    (State.WAITING, Move.FINISH): State.FINISHED,
    (State.PARTIAL, Move.FINISH): State.FINISHED,
    (State.READY, Move.FINISH): State.FINISHED,
    (State.PREFILLING, Move.FINISH): State.LEAVING,
    (State.STEPPING, Move.FINISH): State.LEAVING,
    (State.LEAVING, Move.LET_GO): State.FINISHED,
}
"""The one table: (state, move) -> next state. What is not here cannot happen."""

_OVER = frozenset({State.LEAVING, State.FINISHED})

IN_FLIGHT = frozenset({State.PREFILLING, State.STEPPING, State.LEAVING})
"""States in which exactly one batch in flight holds the row."""

RESIDENT = frozenset({State.PREFILLING, State.PARTIAL, State.READY, State.STEPPING, State.LEAVING})
"""States in which blocks of a replica are reserved."""


@dataclass(slots=True, eq=False)
class Sequence:
    """The pool's record of one admitted request."""

    request: Request
    number: int
    """Rises with every admitted request: the order of arrival."""
    arrived_s: float = 0.0
    deadline_s: float | None = None
    state: State = State.WAITING
    committed: list[int] = field(default_factory=list)
    batch_id: int | None = None
    """The batch in flight that holds the row, else None."""
    blocks: int = 0
    """Its replica has room for its tokens in so many blocks; see `ReplicaSpec.blocks_taken`."""
    record: FailureRecord = field(default_factory=FailureRecord)
    """Batches and replicas that broke with it; see `faults`."""
    steps: int = 0
    draft_tokens: int = 0
    drafts: int = 0
    """Steps in which draft tokens were asked for."""
    accepted_at: list[int] = field(default_factory=list)
    """accepted_at[j]: in how many steps draft token j was accepted."""
    tried: float = 0.0
    """Draft tokens that were checked lately, older ones counting less; see `acceptance`."""
    agreed: float = 0.0
    """Those of them that the target agreed with."""
    id: str = field(init=False)
    length: int = field(init=False)
    """Content length: prompt and committed tokens, padding never."""
    length_max: int = field(init=False)
    """Content length when the limit is reached."""
    validated: bool = field(init=False)
    """Whether a known replica could take it when it was admitted, or an earlier pool's."""
    replica_id: str | None = None
    turn: float = -inf
    """Its place among the rows of its replica; see `ReadyRows`. -inf: it has had no step there."""
    prefilled: int = 0
    """While it is being filled: its valid KV positions once the batch in flight is done."""
    queued_s: float = 0.0
    """Seconds in the queue until a replica first took it."""
    reservation: str | None = None
    """The replica that takes nothing behind this sequence in the queue until it fits."""
    preempted: bool = False
    """KV blocks ran out and it was sent back: from then on all that it may need is set aside."""
    excluded_replicas: list[str] = field(default_factory=list)
    """Replicas on which it failed alone; it goes to others while there are any."""
    replicas: list[str] = field(default_factory=list)
    recovered: int = 0
    cached_tokens: int = 0
    keys: tuple[BlockKey, ...] = ()
    """Of its blocks, as far as they were asked for; with blocks of `keys_size` positions."""
    keys_size: int | None = None

    def __post_init__(self) -> None:
        self.id = self.request.id
        self.length = len(self.request.prompt) + len(self.committed)
        self.length_max = self.request.length_max

    @property
    def quarantined(self) -> bool:
        """Whether it runs apart from the others; see `FailureRecord.rows_limit`."""
        return self.record.rows_limit is not None

    @property
    def tokens_left(self) -> int:
        return self.length_max - self.length

    @property
    def salt(self) -> str:
        """What two sequences must have in common to share KV, beside tokens: the salt that the
        client chose, and the tenant, so that no tenant can find out by the time to the first token
        what another one asked."""
        tenant = self.request.tenant
        return f"{len(tenant)} {tenant} {self.request.cache_salt}"

    def block_keys(self, block_size: int) -> tuple[BlockKey, ...]:
        """Keys of the blocks that a replica could have of its prefix; see `prefixes`."""
        if block_size != self.keys_size:
            self.keys, self.keys_size = (), block_size
        if (len(self.keys) + 1) * block_size + 1 < self.length:
            self.keys = block_keys(self.content(), block_size, self.salt, self.keys)
        return self.keys

    @property
    def prefill_len(self) -> int:
        """KV positions that its prefill fills: the last token has none yet."""
        return self.length - 1

    @property
    def live(self) -> bool:
        """Its Finish is not out yet."""
        return self.state not in _OVER

    def move(self, move: Move) -> None:
        """Changes the state; a move that the table does not have is a broken invariant."""
        after = LEGAL.get((self.state, move))
        assert after is not None, f"{self.id}: no move '{move}' from state '{self.state}'"
        self.state = after

    def content(self) -> tuple[int, ...]:
        return self.request.prompt + tuple(self.committed)

    def commit(self, row: RowResult) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends what a step committed, cut at the limit and at the first stop token.

        Returns the tokens kept and the reason to finish, if there is one. A stop token is itself
        kept, as the last one. The prompt is never searched. Steps, draft tokens and accepted
        tokens are counted as the replica reports them, so when a result is cut they may cover
        tokens that were dropped; completion tokens never do.
        """
        assert self.state not in _OVER, f"{self.id}: a finished sequence never changes"
        kept, reason = truncate(row.tokens, self.tokens_left, self.request.stop_token_ids)
        self.committed += kept
        self.length += len(kept)
        self.draft_tokens += row.draft_tokens
        self.steps += row.steps
        self.drafts += row.tried_at[0] if row.tried_at else 0
        both = zip_longest(self.accepted_at, row.accepted_at, fillvalue=0)
        self.accepted_at = [before + now for before, now in both]
        if self.quarantined:
            # New tokens beyond where it broke something speak for it.
            self.record = self.record.at(self.length)
            if not self.quarantined:
                self.excluded_replicas.clear()
        return kept, reason

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.committed),
            cached_tokens=self.cached_tokens,
            steps=self.steps,
            draft_tokens=self.draft_tokens,
            accepted_tokens=sum(self.accepted_at),
            accepted_at=tuple(self.accepted_at),
            replicas=tuple(self.replicas),
            recovered=self.recovered,
            queued_s=self.queued_s,
            drafts=self.drafts,
        )


Answer = tuple[Sequence, RowResult]
"""A live row of a batch that was done, and what came back of it."""
Chunk = tuple[Sequence, int, int]
"""A row of a prefill batch, and the KV positions (begin, until) that the batch fills."""


def answers_of(rows: list[Sequence], result: StepResult) -> list[Answer]:
    """These rows of a batch, each with what came back of it."""
    by_id = {row.sequence_id: row for row in result.rows}
    return [(row, by_id.get(row.id) or RowResult(row.id)) for row in rows]


def truncate(
    tokens: tuple[int, ...], tokens_left: int, stop_token_ids: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Cuts new tokens after the first stop token, or after `tokens_left` of them.

    A stop token that is also the last one allowed counts as STOP.
    """
    kept = tokens[:tokens_left]
    for index, token in enumerate(kept):
        if token in stop_token_ids:
            return kept[: index + 1], FinishReason.STOP
    if len(kept) == tokens_left:
        return kept, FinishReason.LENGTH
    return kept, None


def finished_before_start(request: Request) -> FinishReason | None:
    """Why a request that carries committed tokens needs no further step, if it does not."""
    if request.committed and request.committed[-1] in request.stop_token_ids:
        return FinishReason.STOP
    if len(request.committed) >= request.max_new_tokens:
        return FinishReason.LENGTH
    return None
