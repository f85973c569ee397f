"""How many draft tokens a head gets right, in real speculative steps of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.messages import RowResult, StepResult


@dataclass(frozen=True)
class Acceptance:
    """Of some prompts at a fixed draft length."""

    steps: int
    """Of rows: a step of a batch counts once for each row."""
    accepted: float
    """Draft tokens per row and step that were right."""
    by_position: tuple[float, ...]
    """Share of draft token j that is right, of the steps in which all before it are."""
    tokens_per_s: float = 0.0

    def said(self) -> str:
        shares = ", ".join(f"{share:.0%}" for share in self.by_position)
        return f"{self.accepted:.3f} accepted of {len(self.by_position)} per step ({shares})"


def acceptance_of(
    results: Iterable[StepResult], draft_len: int, seconds: float = 0.0
) -> Acceptance:
    """Of an engine's results; prefills have no steps and count nothing."""
    rows: Sequence[RowResult] = [row for result in results for row in result.rows if row.steps]
    steps = sum(row.steps for row in rows)
    accepted, tried = ([0] * draft_len for _ in range(2))
    for row in rows:
        for position, count in enumerate(row.accepted_at[:draft_len]):
            accepted[position] += count
        for position, count in enumerate(row.tried_at[:draft_len]):
            tried[position] += count
    shares = tuple(a / t if t else 0.0 for a, t in zip(accepted, tried, strict=True))
    tokens = sum(len(row.tokens) for row in rows)
    return Acceptance(
        steps, sum(accepted) / max(1, steps), shares, tokens / seconds if seconds else 0.0
    )
