"""The draft length of the greatest goodput: expected tokens over expected time.

With acceptance a of a row, k draft tokens commit 1 + a + ... + a^k tokens of it. Every k from 0 to
the most is tried, because times rise in steps and so goodput has several peaks.

Where a verification budget is allowed (TETRIS, arXiv 2502.15197), a batch may also verify only a
share of its draft tokens, those that the draft rates highest. The rating knows at least what the
rows' acceptances tell, so of v verified tokens as many are expected to be accepted as of the v
likeliest by a^j.

Pure arithmetic; knows no sequence and no replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain
from operator import mul

SHARES = (0.75, 0.5)
"""Shares of the drafted tokens that may be verified, beside all of them."""
STAY = 0.99
"""The last choice is kept while it reaches that share of the best goodput."""
BUDGET_WORTH = 0.97
"""What a share counts for against all: what it keeps is known less well."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a batch drafts and verifies."""

    draft_len: int = 0
    share: float = 1.0
    """Of the drafted tokens, to verify."""

    def verify_tokens(self, rows: int) -> int | None:
        """Draft tokens of all rows that are verified; None: all of them."""
        return None if self.share >= 1.0 else round(rows * self.draft_len * self.share)


def likelihoods(
    acceptances: Sequence[float], limits: Sequence[int], most: int
) -> list[list[float]]:
    """Of each draft position up to `most`: how likely it is accepted in each row.

    `acceptances` and `limits` (most draft tokens) are those of each row.
    """
    least = min(limits, default=most)
    likely: list[float] = list(acceptances)
    found = []
    for position in range(most):
        if position >= least:
            likely = [
                one if position < limit else 0.0 for one, limit in zip(likely, limits, strict=True)
            ]
        found.append(likely)
        likely = list(map(mul, likely, acceptances))
    return found


def goodputs(likely: Sequence[list[float]], rows: int, seconds: Sequence[float]) -> list[float]:
    """Tokens per second by draft length; `seconds` are those of a step of so many rows."""
    tokens = float(rows)
    found = [tokens / seconds[0]]
    for position, spent_s in zip(likely, seconds[1:], strict=True):
        tokens += sum(position)
        found.append(tokens / spent_s)
    return found


def best_draft_len(by_draft_len: Sequence[float], last: int) -> int:
    """The draft length of the greatest goodput; the last one where it is nearly as good."""
    best = max(by_draft_len)
    if last < len(by_draft_len) and by_draft_len[last] >= STAY * best:
        return last
    return by_draft_len.index(best)


def best_share(
    likely: Sequence[list[float]],
    rows: int,
    seconds: Callable[[int, int], float],
    goodput: float,
    last: Choice,
) -> Choice | None:
    """The best draft length of which a share is verified, if it is better than `goodput`.

    `seconds(k, v)`: of a step with k draft tokens per row that verifies v of them all.
    """
    found = None
    for draft_len in range(2, len(likely) + 1):
        for share in SHARES:
            choice = Choice(draft_len, share)
            verified = choice.verify_tokens(rows) or 0
            kept = sum(nlargest(verified, chain(*likely[:draft_len])))
            worth = BUDGET_WORTH * (rows + kept) / seconds(draft_len, verified)
            if choice == last:
                worth /= STAY
            if worth > goodput:
                found, goodput = choice, worth
    return found
