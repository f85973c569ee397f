"""Proves that the choice is that of the greatest goodput, by trying all of them."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.draft_length.cost_model import StepPrices
from scheduler.draft_length.estimates import LinearCost
from scheduler.draft_length.fit import tokens_key
from scheduler.draft_length.goodput import (
    SHARES,
    STAY,
    TRIM_WORTH,
    Choice,
    DraftBelief,
    best_choice,
    evenly,
    expected_accepted,
    verify_tokens,
)

acceptances = st.lists(
    st.tuples(st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]), st.integers(0, 8)),
    min_size=1,
    max_size=16,
)


def prices_of(rows: int, draft_s: float, token_s: float, ratios: Rows[float] = ()) -> StepPrices:
    """`ratios`: what a verification takes over its line, by draft length."""
    by_key = {tokens_key(rows * (k + 1)): ratio for k, ratio in enumerate(ratios)}
    verify = LinearCost(10e-3, token_s, 1e-7)
    packed = LinearCost(11e-3, token_s, 1e-7)
    rest, packed_rest = LinearCost(1e-4), LinearCost(3e-4)
    return StepPrices(
        rows, 100, LinearCost(draft_s), verify, packed, rest, packed_rest, by_key, by_key
    )


def expected_of(rows: list[tuple[float, int]], most: int) -> list[float]:
    """`rows` are (acceptance, most draft tokens)."""
    return list(expected_accepted([one for one, _ in rows], [limit for _, limit in rows], most))


@settings(max_examples=150, deadline=None)
@given(
    acceptances,
    st.floats(1e-4, 1e-2),
    st.floats(1e-5, 2e-3),
    st.booleans(),
    st.lists(st.floats(0.5, 2.0), max_size=9),
)
def test_no_other_choice_has_a_greater_goodput(
    rows: list[tuple[float, int]],
    draft_s: float,
    token_s: float,
    trims: bool,
    ratios: list[float],
) -> None:
    prices = prices_of(len(rows), draft_s, token_s, ratios)
    expected = expected_of(rows, 8)
    belief = DraftBelief()

    def goodput(choice: Choice) -> float:
        worth = TRIM_WORTH if choice.share < 1.0 else 1.0
        kept = belief.kept(expected, choice)
        seconds = prices(choice.draft_len, verify_tokens(len(rows), choice))
        return worth * (len(rows) + kept) / seconds

    found = best_choice(expected, prices, 0.0, belief if trims else None, Choice(8))
    choices = [Choice(draft_len) for draft_len in range(9)]
    if trims:
        choices += [Choice(draft_len, share) for draft_len in range(2, 9) for share in SHARES]
    assert goodput(found) >= STAY * max(map(goodput, choices)) - 1e-9
    assert trims or found.share == 1.0


def test_expected_tokens_are_the_sum_over_rows_up_to_their_limits() -> None:
    expected = expected_of([(0.5, 3), (1.0, 1), (0.9, 0)], 4)
    assert expected == pytest.approx([0.0, 1.5, 1.75, 1.875, 1.875])


@pytest.mark.parametrize(("ratio", "tried"), [(0.5, True), (0.97, False)])
def test_what_was_not_seen_is_tried_where_it_may_gain_much(ratio: float, tried: bool) -> None:
    """3 was seen and is the best by all that is known; of 4 it is hoped that it takes no longer."""
    rows = [(0.8, 8)] * 8
    known = prices_of(8, 1e-3, 3e-4, [1.0] * 4)
    hoping = replace(known, hopes=known.ratios | {tokens_key(8 * 5): ratio})
    expected = expected_of(rows, 8)
    assert best_choice(expected, known, 0.0, None, Choice(0)).draft_len == 3
    assert (best_choice(expected, hoping, 0.0, None, Choice(0)).draft_len == 4) == tried


def test_the_best_is_found_behind_lengths_that_are_worse() -> None:
    """By tiles: 1 and 2 begin one that 3 fills."""
    rows, ratios = [(0.95, 8)] * 8, [1.0, 2.2, 2.0, 1.2, 4.0, 4.0, 4.0, 4.0, 4.0]
    prices, expected = prices_of(8, 1e-4, 1e-3, ratios), expected_of(rows, 8)
    goodputs = [(8 + accepted) / prices(k) for k, accepted in enumerate(expected)]
    assert max(goodputs[1:3]) < goodputs[0] < goodputs[3], "the example has no dip"
    assert best_choice(expected, prices, 0.0, None, Choice(0)).draft_len == 3


def test_the_last_choice_stays_while_it_is_nearly_the_best() -> None:
    rows = [(0.8, 8)] * 8
    prices, expected = prices_of(8, 1e-3, 3e-4), expected_of(rows, 8)
    best = best_choice(expected, prices, 0.0, None, Choice(0))
    near = Choice(best.draft_len + 1)
    ratio = ((8 + expected[near.draft_len]) / prices(near.draft_len)) / (
        (8 + expected[best.draft_len]) / prices(best.draft_len)
    )
    assert STAY < ratio < 1.0, "the example is not what it is meant to be"
    assert best_choice(expected, prices, 0.0, None, near) == near
    assert best_choice(expected, prices, 0.0, None, Choice(8)) == best


def test_a_share_by_belief_keeps_what_was_seen_and_never_more_than_everything() -> None:
    expected = expected_of([(0.8, 8)] * 4, 8)
    belief = DraftBelief()
    half = Choice(6, 0.5)
    assert evenly(expected, half) == expected[3]
    for _ in range(100):
        belief.observe(expected, half, 0.7 * expected[3])
    assert belief.kept(expected, half) == pytest.approx(0.7 * expected[3], rel=0.01)
    for _ in range(100):
        belief.observe(expected, half, 2.0 * expected[6])
    assert belief.kept(expected, half) == expected[6]
    assert belief.kept(expected, Choice(6)) == expected[6]


@pytest.mark.parametrize(
    ("choice", "tokens"), [(Choice(4), None), (Choice(4, 0.5), 16), (Choice(3, 0.75), 18)]
)
def test_a_share_is_of_all_rows_together(choice: Choice, tokens: int | None) -> None:
    assert verify_tokens(8, choice) == tokens
