"""Requests, the batches that serve them, and what replicas answer.

All are frozen dataclasses without behaviour. Token ids are plain ints, lengths are in tokens, times
in seconds. Others import them from `scheduler.messages`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from scheduler.decoding import Decoding, TokenLogprobs

# --------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from the target's logits; greedy when `temperature` is 0."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens with at least min_p times the probability of the best one; in [0, 1]."""
    seed: int = 0
    """Keys the noise together with the position; 0 <= seed < 2**63."""


class Priority(IntEnum):
    """A request's class: the lower value is served first, but waiting ages, so none starves."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for, tokenized; `id` is unique within the pool."""

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_token_ids: tuple[int, ...] = ()
    draft_len: int | None = None
    """Draft tokens per step, the config's draft_len_max at most; 0: none. None: as is chosen."""
    timeout_s: float | None = None
    """Time from `Submit` to the deadline; None for no deadline."""
    committed: tuple[int, ...] = ()
    """Tokens that an earlier incarnation of the pool delivered; they count as new tokens."""
    priority: Priority = Priority.NORMAL
    tenant: str = ""
    """The request counts for this one where tenants share a contended pool."""
    cache_salt: str = ""
    """KV blocks are shared only between requests of the same salt."""
    decoding: Decoding | None = None
    """What else a replica does with the request's tokens; the scheduler passes it on unread."""
    expected_new_tokens: int | None = None
    """New tokens that count where load is bounded, for a limit that nobody asked for. None: the
    limit."""

    @property
    def length_max(self) -> int:
        """Tokens of its content (prompt + new tokens) at the longest."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def length_expected(self) -> int:
        """The same as load counts it."""
        expected = self.expected_new_tokens
        return self.length_max if expected is None else len(self.prompt) + expected


# --------------------------------------------------------------------------- batches


class BatchKind(StrEnum):
    PREFILL = "prefill"
    SPECULATE = "speculate"


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A sequence that becomes a resident: its KV cache is filled for all tokens but the last.

    A long one is filled over several batches. Between them it is a resident that no step takes.
    """

    sequence_id: str
    tokens: tuple[int, ...]
    """All content: prompt, then committed tokens. Empty in all its batches but the first."""
    tokens_left: int
    """How many more tokens the sequence may commit, at least 1."""
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    blocks: int
    """The sequence has room for the tokens of so many blocks from now on."""
    begin: int = 0
    """KV positions that earlier batches have filled."""
    until: int | None = None
    """KV positions that are valid after this batch. None: all of `tokens` but the last."""
    salt: str = ""
    """KV blocks are shared only between sequences of the same salt."""
    decoding: Decoding | None = None
    """The request's; None in all its batches but the first."""

    @property
    def end(self) -> int:
        """KV positions that are valid after this batch, as a number."""
        return len(self.tokens) - 1 if self.until is None else self.until


@dataclass(frozen=True, slots=True)
class StepRow:
    """A resident that takes part in the steps of a batch."""

    sequence_id: str
    length: int
    """Content length before the first step; the replica checks it against its own."""
    draft_len: int
    """Draft tokens of this row per step, at most the batch's; the replica lowers it to
    tokens_left - 1 so that no row ever drafts beyond its limit."""
    blocks: int
    """The sequence has room for the tokens of so many blocks from now on: enough for all steps of
    the batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What the pool asks of a replica. `id` is never reused, so a late result is recognised."""

    id: int
    replica_id: str
    kind: BatchKind
    prefill: tuple[PrefillRow, ...] = ()
    rows: tuple[StepRow, ...] = ()
    draft_len: int = 0
    """k of the batch: the largest draft_len of its rows."""
    steps: int = 1
    """At most: the batch ends early once a row has finished, or when it is interrupted."""

    @property
    def row_ids(self) -> list[str]:
        return [row.sequence_id for row in self.prefill or self.rows]

    @property
    def prefill_tokens(self) -> int:
        """KV positions that it fills, those included that the replica may find filled."""
        return sum(row.end - row.begin for row in self.prefill)

    @property
    def spread(self) -> int:
        """Tokens between the longest and the shortest row of a speculate batch."""
        return self.rows[-1].length - self.rows[0].length


@dataclass(frozen=True, slots=True)
class RowFailure:
    """Why a row can go no further, whatever batch or replica it is in."""

    message: str
    field: str = ""
    """The field of the request that is at fault, as `Decoding` has it; empty: no field is."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row committed over the steps of a batch."""

    sequence_id: str
    tokens: tuple[int, ...] = ()
    """Committed tokens in order. The pool, not the replica, truncates at a stop token."""
    steps: int = 0
    draft_tokens: int = 0
    """That it had: a drafter may propose fewer than are asked for."""
    accepted_at: tuple[int, ...] = ()
    """accepted_at[j]: in how many steps draft token j (from 0) was accepted."""
    tried_at: tuple[int, ...] = ()
    """tried_at[j]: in how many steps draft token j was asked for and all before it were accepted,
    so that accepted_at[j] / tried_at[j] is the chance that asking for it gains a token. A token
    that was asked for and not drafted counts."""
    asked_tokens: int = 0
    """Draft tokens asked for: at most the row's draft length per step, fewer near its limit."""
    extras: tuple[TokenLogprobs, ...] = ()
    """What the request wants to be told of each of the tokens; of a prefill, of the prompt tokens
    after the positions that it has filled. The pool cuts them where it cuts tokens."""
    failure: RowFailure | None = None
    """Why it ends behind its tokens, unless it has ended with them."""
    reused: int = 0
    """In a sequence's first prefill batch: KV positions from the beginning that the replica had
    already, of another sequence with the same prefix."""
    accepted: tuple[int, ...] = ()
    """Of each step, how many draft tokens were accepted: so many of `tokens`, then one of the
    target's own."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a batch's time went."""

    prefill_s: float = 0.0
    """Filling KV caches: in a prefill the drafter's too, in a step what it has not seen."""
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0
    hidden_s: float = 0.0
    """What passed of `draft_s` and `prefill_s` while other batches ran, so that `total_s` is less
    by it; negative where a step waited for its draft for longer than that took."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """A replica's answer to one batch."""

    batch_id: int
    replica_id: str
    rows: tuple[RowResult, ...]
    steps: int = 0
    times: StepTimes = StepTimes()


TriedBatch = tuple[Batch, StepResult]
"""A batch that a replica ran before it joined, and what came of it."""


KvGroups = tuple[tuple[int, int | None], ...]
"""A target's layers by what they keep of a text: so many block tables with at most so many blocks
of a sequence each, for layers that see a window, or with all (None). Empty: one table with all."""


def blocks_taken(groups: KvGroups, blocks: int) -> int:
    """KV blocks that a sequence takes which has room for the tokens of so many blocks. All that is
    counted of a sequence's memory is counted by this function; it never falls."""
    if not groups:
        return blocks
    return sum(tables * (blocks if most is None else min(blocks, most)) for tables, most in groups)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica can hold; sent when it joins."""

    kv_blocks: int
    """Blocks that sequences may use; see `blocks_taken`."""
    block_size: int
    """KV positions per block."""
    context_len: int
    """Longest content (prompt + new tokens) of a sequence."""
    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    embedding_size: int = 0
    """Rows of the target's embedding, padding included: it may emit ids below it, and a request
    that starts over brings them back as committed tokens. 0: no padding."""
    draft_len_max: int = 32
    """Draft tokens per row and step that it can propose; 0 without a drafter."""
    draft_len: int | None = None
    """Draft tokens of every row and step, if it was told so; None: the scheduler chooses."""
    drafter: str = ""
    """What drafts, for people: the method, and what was found wrong with it when it was loaded."""
    rows_max: int | None = None
    """Rows of a batch that its memory lasts for; None: as many as the config says."""
    prefix_sharing: bool = False
    """Whether it keeps KV blocks of equal prefixes for others."""
    overlaps: bool = False
    """Whether it drafts a batch while it checks another one."""
    kv_groups: KvGroups = ()
    target: str = ""
    """Name of the target, for people."""
    draft: str = ""
    """Name of the draft model or head, for people; empty without one."""
    device: str = "cpu"
    dtype: str = "float32"
    arithmetic: str = ""
    """How its layers compute, and whether a token's bits depend on the batch, for people."""
    fingerprint: str = ""
    """Of the target's weights, the dtype and what else decides output; empty: unknown."""
    trials: tuple[TriedBatch, ...] = field(default=(), compare=False)
    """From them the pool learns its speed at first; it keeps none of them."""
    acceptance: float | None = field(default=None, compare=False)
    """Share of first draft tokens that were right in such a trial; None: not tried."""

    @property
    def logits_size(self) -> int:
        """Tokens that have a logit, those included that only pad the embedding."""
        return max(self.vocab_size, self.embedding_size)

    @property
    def length_max(self) -> int:
        """Longest content, in tokens, that it can hold when it is empty."""
        if not self.kv_groups:  # asked for each that waits
            return min(self.context_len, self.kv_blocks * self.block_size)
        longest = range(1, 1 - -self.context_len // self.block_size)
        blocks = bisect_right(longest, self.kv_blocks, key=self.blocks_taken)
        return min(self.context_len, blocks * self.block_size)

    def blocks_taken(self, blocks: int) -> int:
        """As the function of that name counts them here."""
        return blocks_taken(self.kv_groups, blocks) if self.kv_groups else blocks

    @property
    def texts_kept(self) -> int:
        """Blocks of tokens that it may keep for others, if it shares prefixes."""
        return self.kv_blocks // self.blocks_taken(1) if self.prefix_sharing else 0
