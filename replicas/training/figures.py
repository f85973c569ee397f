"""Figures of heads: how many draft tokens they get right in real steps of an engine, and the
scaling laws through such figures (arXiv 2505.07858).

accepted = a + b * ln(tokens) + c * ln(parameters), by least squares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.messages import RowResult, StepResult

_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Of Student's t, two-sided 95 %, by degrees of freedom from 1."""


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
    """Committed tokens over the seconds that were measured; 0: none were."""

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


@dataclass(frozen=True)
class Point:
    """One head, measured."""

    tokens: int
    """Tokens that it has guessed, those of repeated epochs too."""
    parameters: int
    accepted: float
    """Draft tokens per step, in real steps."""


@dataclass(frozen=True)
class Fit:
    """A line through points over the logarithm of one figure or of two."""

    names: tuple[str, ...]
    slopes: tuple[float, ...]
    """Accepted tokens per unit of the natural logarithm."""
    intervals: tuple[float, ...]
    """Half the width of each slope's 95 % interval; infinite with too few points."""
    constant: float
    r2: float

    def at(self, *values: float) -> float:
        """Accepted draft tokens per step that the line expects. `values`, above 0, as `names`."""
        logs = map(math.log, values)
        return self.constant + sum(
            slope * log for slope, log in zip(self.slopes, logs, strict=True)
        )

    def doubled(self, name: str) -> tuple[float, float]:
        """What twice of it adds, and half the width of the interval."""
        index = self.names.index(name)
        return math.log(2) * self.slopes[index], math.log(2) * self.intervals[index]


def fit(points: Sequence[Point], *names: str) -> Fit:
    """Of `tokens`, `parameters` or both; raises ValueError for points that do not tell them
    apart."""
    logs = np.array([[math.log(getattr(point, name)) for name in names] for point in points])
    accepted = np.array([point.accepted for point in points])
    inputs = np.column_stack([np.ones(len(points)), logs]) if len(points) else np.ones((0, 1))
    if len(points) <= len(names) or np.linalg.matrix_rank(inputs) <= len(names):
        raise ValueError(f"{len(points)} points do not show what {' and '.join(names)} bring")
    solved, *_ = np.linalg.lstsq(inputs, accepted, rcond=None)
    left = accepted - inputs @ solved
    spread = float(((accepted - accepted.mean()) ** 2).sum())
    r2 = 1.0 - float(left @ left) / spread if spread else 1.0
    free = len(points) - inputs.shape[1]
    widths = [math.inf] * len(names)
    if free:
        variance = float(left @ left) / free * np.linalg.inv(inputs.T @ inputs)
        t = _T_95[free - 1] if free <= len(_T_95) else 1.96
        widths = [t * math.sqrt(max(variance[i, i], 0.0)) for i in range(1, inputs.shape[1])]
    slopes = tuple(float(slope) for slope in solved[1:])
    return Fit(tuple(names), slopes, tuple(widths), float(solved[0]), r2)
