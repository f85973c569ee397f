"""The protocol between a step and a drafter.

A drafter may be a model, a head on the target's hidden states, or no model at all. Whatever it
proposes, output is the target's: a draft token counts only where it equals the target's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from replicas.kv_cache import TokenRange
from replicas.sampling.choice import SamplingBatch
from replicas.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that drafting takes, as far as the drafter knows without a trial."""

    once_s: float | None = None
    """Once per step. None: it is measured."""
    token_s: float | None = None
    """For each draft token of a step, all rows together."""


@dataclass(slots=True)
class Ask:
    """What a step wants proposed. Content is read, never changed."""

    ids: Sequence[str]
    contents: Sequence[Sequence[int]]
    """All content tokens per row; at least one."""
    draft_lens: Sequence[int]
    """Draft tokens wanted per row, at most k."""
    sampling: SamplingBatch
    table: torch.Tensor  # [rows, blocks], int64
    rate: bool = False
    """Whether log-probabilities are wanted."""
    token_most: int = 0
    """Ids from it on are not to be proposed: only the drafter has them."""

    @property
    def k(self) -> int:
        return max(self.draft_lens)


@dataclass(slots=True)
class Proposal:
    tokens: torch.Tensor  # [k, rows], int64
    lens: Sequence[int]
    """Draft tokens that it has per row, at most those asked for."""
    log_probabilities: torch.Tensor | None = None  # [rows, k], float32
    """Of each token and all before it together; only if the drafter rates."""


@dataclass(slots=True)
class Seen:
    """What the target has computed: a prefill chunk of some rows, or the check of a step."""

    ids: Sequence[str]
    contents: Sequence[Sequence[int]]
    """Content before the step."""
    ranges: Sequence[TokenRange]
    """KV positions [begin, end) that are valid now and were not before."""
    table: torch.Tensor  # [rows, blocks], int64
    drafted: int | None = None
    """k of a step's check; None: a prefill."""
    taps: list[torch.Tensor] = field(default_factory=list)  # each [tokens, hidden]
    """The hidden states that the drafter taps, for all tokens of the ranges."""


class Drafter(Protocol):
    """One drafter of a replica. Rows are known by their sequence's id."""

    name: str
    draft_len_max: int | None
    """Draft tokens per row and step at most; None: no bound of its own."""
    taps: tuple[int, ...]
    """Hidden states of the target that it wants to see; see `Wants.taps`."""
    vocab: int | None
    """Ids that it can propose are below it; None: all of the target's."""
    rates: bool
    """Whether it yields log-probabilities."""

    def begin(self, row: str, tokens: Sequence[int], salt: str, filled: int) -> None:
        """A row's life on this replica begins; its first `filled` KV positions are shared blocks,
        valid in the drafter's caches, too."""
        ...

    def end(self, row: str) -> None:
        """The row has left; unknown ones are ignored."""
        ...

    def observe(self, seen: Seen) -> None:
        """After each prefill chunk and each check."""
        ...

    def propose(self, ask: Ask, watch: Stopwatch) -> Proposal:
        """Draft up to k tokens per row; k is at least 1."""
        ...

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        """A batch has failed: the rows have these content lengths again."""
        ...

    def valid(self, row: str) -> int | None:
        """KV positions of the row that its caches hold, for sharing blocks; None: it has none."""
        ...

    def cost(self) -> Cost: ...

    def memory(self) -> int:
        """Bytes of its weights and caches."""
        ...
