"""What steps of a virtual replica take, if times are linear in what a step does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.messages import Batch, BatchKind, StepTimes

Cost = Callable[[int, int], float]
"""Seconds of so many tokens that read so many KV positions."""


@dataclass(frozen=True)
class LinearCost:
    """Seconds: once, per token and per KV position."""

    fixed_s: float
    token_s: float = 0.0
    kv_s: float = 0.0

    def __call__(self, tokens: int, kv: int) -> float:
        return self.fixed_s + self.token_s * tokens + self.kv_s * kv


@dataclass
class LinearTimes:
    """A replica's true times."""

    draft: Cost
    """One pass, by rows."""
    verify: Cost
    """By tokens: rows times k + 1."""
    prefill: Cost
    """By the positions that it fills."""
    rest_s: float = 0.0

    def __call__(self, batch: Batch) -> StepTimes:
        """Of one step of a batch, or of all of a prefill."""
        if batch.kind is BatchKind.PREFILL:
            spent_s = self.prefill(batch.prefill_tokens, 0)
            return StepTimes(prefill_s=spent_s, total_s=spent_s)
        rows, kv = len(batch.rows), sum(row.length for row in batch.rows)
        draft_s = batch.draft_len * self.draft(rows, kv)
        verify_s = self.verify(rows * (batch.draft_len + 1), kv)
        total_s = draft_s + verify_s + self.rest_s
        return StepTimes(draft_s=draft_s, verify_s=verify_s, total_s=total_s)
