"""The protocol between a step and a drafter.

A drafter may be a model, a head on the target's hidden states, or no model at all. Whatever it
proposes, output is the target's: a draft token counts only where it equals the target's choice.

A replica knows its drafter by `Drafter`, and what a drafter is made of by `DraftSource`. What
drafting costs, once per step and per token, no drafter says: `replicas.calibration` times it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.kv_cache import TokenRange
from replicas.memory import DraftMemory, MemoryPlan
from replicas.sampling import Noise, SamplingBatch
from replicas.stopwatch import Stopwatch


@dataclass(slots=True)
class DraftRequest:
    """The rows of a step, and what it wants proposed. Content is read, never changed."""

    ids: Sequence[str]
    contents: Sequence[Sequence[int]]
    """All content tokens per row; at least one."""
    draft_lens: Sequence[int]
    """Draft tokens wanted per row, at most k."""
    sampling: SamplingBatch
    table: torch.Tensor  # [rows, blocks], int64
    noise: Noise | None = None
    """Of the target's tokens: column j is that of draft token j. None: all rows are greedy."""
    token_most: int = 0
    """Ids from it on are not to be proposed: only the drafter has them."""

    @property
    def k(self) -> int:
        return max(self.draft_lens)


@dataclass(slots=True)
class Proposal:
    tokens: torch.Tensor  # [k or more, rows], int64; what lies beyond a row's length means nothing
    lens: Sequence[int]
    """Draft tokens that it has per row, at most those asked for; k is the most of them."""

    @classmethod
    def of(cls, drafts: Sequence[list[int]], device: torch.device) -> Proposal:
        """One draft per row."""
        lens = [len(draft) for draft in drafts]
        k = max(lens)
        padded = [draft + [0] * (k - len(draft)) for draft in drafts]
        tokens = torch.tensor(padded, dtype=torch.int64).view(len(drafts), k)
        return cls(tokens.to(device).t(), lens)


@dataclass(slots=True)
class Observation:
    """What the target has computed: a prefill chunk of some rows, or the check of a step."""

    ids: Sequence[str]
    contents: Sequence[Sequence[int]]
    """Content before the step."""
    ranges: Sequence[TokenRange]
    """KV positions [begin, end) that are valid now and were not before."""
    table: torch.Tensor  # [rows, blocks], int64
    committed: Sequence[Sequence[int]] = ()
    """What each row's content is followed by now; empty for a prefill."""
    drafted: Sequence[int] | None = None
    """How many of the drafter's own tokens each row's check began with; None: a prefill."""
    aux_hidden_states: Sequence[torch.Tensor] = field(default_factory=list)  # each [tokens, hidden]
    """Those after the drafter's `aux_layers`, of all tokens of the ranges, row by row."""


class Drafter(Protocol):
    """One drafter of a replica. Rows are known by their sequence's id.

    A call that raises fails the batch: rows of a prefill end, those of a step are rolled back.
    """

    name: str
    """Of its weights, if it has any: caches of drafters with different names are never shared."""
    aux_layers: tuple[int, ...]
    """Layers of the target whose hidden states it wants to see, rising; see
    `ForwardOptions.aux_layers`. With any, its KV of a position depends on the next token, too."""

    def begin(self, row: str, tokens: Sequence[int], salt: str, prefilled: int) -> None:
        """A row's life on this replica begins; its first `prefilled` KV positions are shared
        blocks, valid in the drafter's caches, too. What rows of different `salt` contain must not
        show in each other's drafts."""
        ...

    def end(self, row: str) -> None:
        """The row has left; unknown ones are ignored."""
        ...

    def observe(self, observed: Observation) -> None:
        """After each prefill chunk and each check, also of a step without drafts."""
        ...

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        """Draft up to k tokens per row; k is at least 1. A row may get none."""
        ...

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        """A batch has failed: the rows have these content lengths again."""
        ...

    def valid(self, row: str) -> int | None:
        """KV positions of the row that its caches hold, for sharing blocks; None: it has none."""
        ...


@runtime_checkable
class DraftsAhead(Protocol):
    """A drafter with a device of its own: it drafts one batch while the target checks another."""

    device: torch.device

    def draft_ahead(self, request: DraftRequest) -> None:
        """Begin to draft what the next `propose` for these rows asks for; the request is on this
        drafter's device. No batch that holds one of the rows runs meanwhile, and any thread may
        call."""
        ...


class DraftSource(Protocol):
    """What a drafter is made of; before its weights are read they are on the meta device."""

    vocab_size: int | None = None
    """Ids from it on no prompt may hold; None: any of the target's."""

    @property
    def draft_len_max(self) -> int | None:
        """Draft tokens of a row and step that it can propose at most; None: any number."""
        return None

    @property
    def memory(self) -> DraftMemory:
        """What the replica's plan leaves for it."""
        return DraftMemory()

    def load(self, config: ReplicaConfig, device: torch.device) -> DraftSource:
        """The same with weights, if it has any. Raises PairRefused."""
        return self

    def drafter(self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan) -> Drafter:
        """A new drafter, with caches of the plan's blocks. Raises PairRefused."""
        ...


@dataclass(frozen=True)
class SourceAround(DraftSource):
    """One whose drafter calls another source's: it drafts the same tokens, as far."""

    other: DraftSource

    @property
    def vocab_size(self) -> int | None:  # type: ignore[override]
        return self.other.vocab_size

    @property
    def draft_len_max(self) -> int | None:
        return self.other.draft_len_max
