"""Scaling laws of a drafter (arXiv 2505.07858): accepted tokens by training tokens and capacity.

accepted = a + b * ln(tokens) + c * ln(parameters), by least squares. Knows numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Of Student's t, two-sided 95 %, by degrees of freedom from 1."""


@dataclass(frozen=True)
class Point:
    """One head, measured."""

    tokens: int
    """Answer tokens that it has seen."""
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
