"""Suffix decoding where it has much to say, another drafter elsewhere, row by row in each step.

What followed the same words before costs nothing to draft and is often right for many tokens, where
a text copies; a head or a draft model guesses a few tokens of any text. As SuffixDecoding with a
model beside it (arXiv 2411.04975), the draft is the suffix's where its expected accepted tokens are
at least what the other has had accepted of late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.drafters.history import TOKEN_BYTES
from replicas.drafters.protocol import (
    Drafter,
    DraftRequest,
    DraftSource,
    Observation,
    Proposal,
    SourceAround,
)
from replicas.drafters.suffix import OUTPUTS_TOKENS, SuffixDrafter
from replicas.memory import DraftMemory, MemoryPlan
from replicas.stopwatch import Stopwatch

FIRST_GUESS = 1.0
"""Accepted tokens of the other drafter, before it has drafted."""
RATE = 0.02
"""Weight of the newest row."""


class SuffixFirstDrafter:
    def __init__(self, other: Drafter) -> None:
        self.name, self.aux_layers = other.name, other.aux_layers
        self._suffix, self._other = SuffixDrafter(), other
        self._by_other: set[str] = set()
        """Rows whose draft of this step is the other's."""
        self._accepted = FIRST_GUESS
        """Of the other's drafts, the mean."""

    def begin(self, row: str, tokens: Sequence[int], salt: str, prefilled: int) -> None:
        self._suffix.begin(row, tokens, salt, prefilled)
        self._other.begin(row, tokens, salt, prefilled)

    def end(self, row: str) -> None:
        self._suffix.end(row)
        self._other.end(row)

    def valid(self, row: str) -> int | None:
        return self._other.valid(row)

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        self._by_other.clear()
        self._suffix.rollback(rows, lengths)
        self._other.rollback(rows, lengths)

    def observe(self, observed: Observation) -> None:
        self._suffix.observe(observed)
        if observed.drafted is None:
            self._other.observe(observed)
            return
        of_other = zip(observed.ids, observed.drafted, strict=True)
        drafted = [count if row in self._by_other else 0 for row, count in of_other]
        self._by_other.clear()
        for count, tokens in zip(drafted, observed.committed, strict=True):
            if count:
                self._accepted += RATE * (min(len(tokens) - 1, count) - self._accepted)
        self._other.observe(replace(observed, drafted=drafted))

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        with watch.section("draft"):
            found = [
                self._suffix.best(row, most) if most else (0.0, [])
                for row, most in zip(request.ids, request.draft_lens, strict=True)
            ]
        left = [
            0 if score >= self._accepted else most
            for (score, _), most in zip(found, request.draft_lens, strict=True)
        ]
        self._by_other = {row for row, most in zip(request.ids, left, strict=True) if most}
        device = request.table.device
        if not self._by_other:
            return Proposal.of([draft for _, draft in found], device)
        other = self._other.propose(replace(request, draft_lens=left), watch)
        own = Proposal.of(
            [[] if most else draft for (_, draft), most in zip(found, left, strict=True)], device
        )
        k = max(len(own.tokens), len(other.tokens))
        of_other = torch.tensor([most > 0 for most in left], device=device)
        tokens = torch.where(of_other, _deep(other.tokens, k), _deep(own.tokens, k))
        lens = zip(left, other.lens, own.lens, strict=True)
        return Proposal(tokens, [others if most else owns for most, others, owns in lens])


def _deep(tokens: torch.Tensor, k: int) -> torch.Tensor:  # [k, rows]
    return torch.nn.functional.pad(tokens, (0, 0, 0, k - len(tokens)))


class SuffixFirstSource(SourceAround):
    @property
    def memory(self) -> DraftMemory:
        memory = self.other.memory
        return replace(memory, kept=memory.kept + TOKEN_BYTES * OUTPUTS_TOKENS)

    def load(self, config: ReplicaConfig, device: torch.device) -> DraftSource:
        return SuffixFirstSource(self.other.load(config, device))

    def drafter(self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan) -> Drafter:
        return SuffixFirstDrafter(self.other.drafter(target, config, plan))
