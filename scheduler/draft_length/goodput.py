"""The draft length, and the share of the drafted tokens to verify, of the greatest goodput.

Goodput is expected tokens over expected time. With acceptance a of a row, k draft tokens commit
1 + a + ... + a^k tokens of it. Time is nearly linear in k (see `cost_model`) and that sum
concave, so goodput rises to its best k and then falls, but for small steps; 0 is among the choices.

Verifying only the tokens that the draft believes in most (TETRIS, arXiv 2502.15197) saves a part of
the verification and loses a few of the tokens. How few, no row's acceptance tells: a share that is
spread evenly over the positions is the least that a choice by belief keeps, and how much better it
does is learned per share.

Pure arithmetic over numbers; knows no sequence and no replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import mul

from scheduler.draft_length.cost_model import StepPrices
from scheduler.draft_length.fit import tokens_key

SHARES = (0.75, 0.5)
"""Shares of the drafted tokens that may be verified, besides all of them."""
STAY = 0.99
"""The last choice is kept while it reaches that share of the best goodput."""
TRIM_WORTH = 0.97
"""What a share counts for against all: what it keeps is known less well, and while it is verified
so are the acceptances, of which only the likelier tokens then tell. A tie is better left alone; on
recorded text that is worth 1 % of the speed."""
FALLS = 3
"""So many draft lengths that are no better than the best one end the search."""
HOPE_WORTH = 0.95
"""What a draft length counts for that is tried in the hope that it fills a tile: less is not worth
the batches that it takes to know."""
_BELIEF_FIRST = 1.0
"""How much better than evenly a share by belief is taken to do before it was tried."""
_BELIEF_RATE = 0.1
_BELIEF_BOUNDS = (0.5, 4.0)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a group drafts and verifies."""

    draft_len: int = 0
    share: float = 1.0
    """Of the drafted tokens, to verify."""


@dataclass(slots=True)
class DraftBelief:
    """How much of what was drafted a share by belief keeps, against one spread evenly."""

    gains: dict[float, float] = field(default_factory=lambda: dict.fromkeys(SHARES, _BELIEF_FIRST))

    def kept(self, expected: Sequence[float], choice: Choice) -> float:
        """Accepted tokens of a choice, `expected` being those of 0, 1, ... positions."""
        everything = expected[choice.draft_len]
        if choice.share >= 1.0:
            return everything
        return min(self.gains[choice.share] * evenly(expected, choice), everything)

    def observe(self, expected: Sequence[float], choice: Choice, accepted: float) -> None:
        """So many tokens were accepted per step of a choice that verified a share."""
        least = evenly(expected, choice)
        if least > 0.0:
            gain = self.gains[choice.share]
            gain += _BELIEF_RATE * (accepted / least - gain)
            self.gains[choice.share] = min(max(gain, _BELIEF_BOUNDS[0]), _BELIEF_BOUNDS[1])


def expected_accepted(
    acceptances: Sequence[float], limits: Sequence[int], most: int
) -> Iterator[float]:
    """Accepted tokens of the whole group per step for 0, 1, ..., `most` positions verified.

    `acceptances` and `limits` (most draft tokens) are those of each row. A position costs a few
    operations over all rows and is worked out when it is asked for.
    """
    expected = 0.0
    yield expected
    likely = acceptances
    least = min(limits, default=most)
    for position in range(most):
        if position >= least:
            likely = [
                one if position < limit else 0.0 for one, limit in zip(likely, limits, strict=True)
            ]
        expected += sum(likely)
        yield expected
        likely = list(map(mul, likely, acceptances))


def evenly(expected: Sequence[float], choice: Choice) -> float:
    """Accepted tokens where a share is the first positions of every row."""
    positions = choice.share * choice.draft_len
    whole = int(positions)
    if whole >= choice.draft_len:
        return expected[choice.draft_len]
    return expected[whole] + (positions - whole) * (expected[whole + 1] - expected[whole])


def verify_tokens(rows: int, choice: Choice) -> int | None:
    """Draft tokens of all rows that are verified; None: all of them."""
    return None if choice.share >= 1.0 else round(rows * choice.draft_len * choice.share)


def best_choice(
    expected: Iterable[float],
    prices: StepPrices,
    per_step_s: float,
    belief: DraftBelief | None,
    last: Choice,
) -> Choice:
    """The choice of the greatest goodput for a group with these prices.

    `expected` is what `expected_accepted` says, and asked no further than needed; `per_step_s` what
    a step costs beside its run; without `belief` all drafted tokens are verified. A number of
    tokens whose verification was not seen twice is hoped to take as little as it can, so it is
    tried where it may pay, twice, and known from then on.
    """
    rows, last_len = prices.rows, last.draft_len
    last_full = last_len if last.share == 1.0 else None
    # Asked for every draft length in turn, so what does not change with it is worked out before.
    none_s, slope_s, bend_s = prices.parabola()
    none_s += per_step_s
    ratios, hopes = prices.ratios, prices.hopes
    verify_s, verify_slope_s = prices.verification()
    trimmed_s = trimmed_slope_s = token_s = 0.0
    if belief is not None:
        trimmed_s, trimmed_slope_s, token_s = prices.trimmed()
        trimmed_s += per_step_s
    best_len, best_share, best_goodput, stay_goodput = 0, 1.0, 0.0, 0.0
    falling = 0
    so_far: list[float] = []
    for draft_len, accepted in enumerate(expected):
        falling += 1
        bent_s = draft_len * draft_len * bend_s
        full_s = none_s + draft_len * slope_s + bent_s
        tokens = tokens_key(rows * (draft_len + 1))
        worth, ratio = 1.0, ratios.get(tokens)
        hope = hopes.get(tokens)
        if hope is not None and (ratio is None or hope < HOPE_WORTH * ratio):
            worth, ratio = HOPE_WORTH, hope
        if ratio is not None:
            # `prices.beyond_s`: a call for every draft length would take longer than that.
            full_s += (ratio - 1.0) * (verify_s + draft_len * verify_slope_s)
        goodput = worth * (rows + accepted) / full_s
        if draft_len == last_full:
            stay_goodput = goodput
        if goodput > best_goodput:
            best_len, best_share, best_goodput, falling = draft_len, 1.0, goodput, 0
        if belief is not None:
            so_far.append(accepted)
            if draft_len > 1:
                seconds = trimmed_s + draft_len * trimmed_slope_s + bent_s
                # No share keeps more than everything or verifies less than the least one.
                fewest_s = seconds + token_s * (SHARES[-1] * rows * draft_len - 0.5)
                most = TRIM_WORTH * (rows + accepted) / fewest_s
                if most > best_goodput or (draft_len == last_len and last_full is None):
                    for share, goodput in _trimmed(rows, so_far, belief, seconds, token_s):
                        if share == last.share and draft_len == last_len:
                            stay_goodput = goodput
                        if goodput > best_goodput:
                            best_len, best_share, best_goodput = draft_len, share, goodput
                            falling = 0
        # Past the top of a curve that rises and then falls, but is not smooth.
        if falling >= FALLS and draft_len >= last_len:
            break
    return last if stay_goodput >= STAY * best_goodput else Choice(best_len, best_share)


def _trimmed(
    rows: int, expected: Sequence[float], belief: DraftBelief, seconds: float, token_s: float
) -> list[tuple[float, float]]:
    """Each share of the longest of these draft lengths with its goodput; such a step takes
    `seconds`, and `token_s` for each verified draft token."""
    draft_len = len(expected) - 1
    found = []
    for share in SHARES:
        choice = Choice(draft_len, share)
        verified = round(rows * draft_len * share)
        kept = belief.kept(expected, choice)
        found.append((share, TRIM_WORTH * (rows + kept) / (seconds + token_s * verified)))
    return found
