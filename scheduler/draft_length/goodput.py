"""The goodput of each draft length: expected tokens over expected time.

Where a row's first draft token is accepted with chance a and each later one with b, k draft tokens
commit 1 + a + a b + ... + a b^(k - 1) tokens of it. Every k from 0 to the most has its own figure,
because times rise in steps and so goodput has several peaks.

Pure arithmetic; knows no sequence and no replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul


def likelihoods(
    first: Sequence[float], later: Sequence[float], limits: Sequence[int], most: int
) -> list[list[float]]:
    """Of each draft position up to `most`: how likely it is accepted in each row.

    `first` and `later` (acceptances) and `limits` (most draft tokens) are those of each row.
    """
    least = min(limits, default=most)
    likely: list[float] = list(first)
    found = []
    for position in range(most):
        if position >= least:
            likely = [
                one if position < limit else 0.0 for one, limit in zip(likely, limits, strict=True)
            ]
        found.append(likely)
        likely = list(map(mul, likely, later))
    return found


def goodputs(likely: Sequence[list[float]], rows: int, seconds: Sequence[float]) -> list[float]:
    """Tokens per second by draft length; `seconds` are those of a step of so many rows."""
    tokens = float(rows)
    found = [tokens / seconds[0]]
    for position, spent_s in zip(likely, seconds[1:], strict=True):
        tokens += sum(position)
        found.append(tokens / spent_s)
    return found
