"""Proves that a sequence's acceptance is estimated from its own tries, at first from others'."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, strategies as st

from scheduler.draft_length.acceptance import (
    CLASS_TRIES,
    FIRST_GUESS,
    AcceptanceRates,
    goodputs,
    likelihoods,
)
from scheduler.messages import Request, RowResult, Sampling
from scheduler.state.sequence import Sequence


def sequence(name: str, temperature: float = 0.0) -> Sequence:
    return Sequence(Request(name, (1,), 1000, Sampling(temperature)), 1)


def step(rng: Random, acceptance: float, draft_len: int) -> RowResult:
    tried, accepted = [0] * draft_len, [0] * draft_len
    for at in range(draft_len):
        tried[at] = 1
        if rng.random() >= acceptance:
            break
        accepted[at] = 1
    return RowResult("a", (), 1, draft_len, tuple(accepted), tuple(tried))


def test_a_sequence_comes_to_its_own_acceptance_whatever_the_others_do() -> None:
    rng = Random(0)
    known = AcceptanceRates()
    easy, hard = sequence("easy"), sequence("hard")
    means = {id(easy): [], id(hard): []}
    for at in range(600):
        known.observe([(easy, step(rng, 0.9, 4))])
        known.observe([(hard, step(rng, 0.2, 4))])
        if at > 50:
            for row in (easy, hard):
                means[id(row)].append(known.of([row])[0])
    assert sum(means[id(easy)]) / len(means[id(easy)]) == pytest.approx(0.9, abs=0.1)
    assert sum(means[id(hard)]) / len(means[id(hard)]) == pytest.approx(0.2, abs=0.2)


def test_a_new_sequence_is_expected_to_be_like_the_others_of_its_class() -> None:
    rng = Random(1)
    known = AcceptanceRates()
    assert known.of([sequence("first")])[0] == pytest.approx(FIRST_GUESS)
    old = sequence("old")
    for _ in range(300):
        known.observe([(old, step(rng, 0.1, 3))])
    assert known.of([sequence("new")])[0] == pytest.approx(0.1, abs=0.05)
    assert known.of([sequence("sampled", 1.0)])[0] == pytest.approx(FIRST_GUESS), "another class"
    known.expect(0.9)  # of a replica's trial: it stands where nothing else is known
    assert known.of([sequence("new")])[0] == pytest.approx(0.1, abs=0.05)
    assert known.of([sequence("sampled", 1.0)])[0] == pytest.approx(0.9)


def test_a_row_that_drafts_nothing_comes_back_to_what_its_class_shows() -> None:
    rng = Random(3)
    known = AcceptanceRates()
    one, other = sequence("one"), sequence("other")
    for _ in range(30):
        known.observe([(one, step(rng, 0.0, 4))])
    for _ in range(200):
        known.observe([(other, step(rng, 0.9, 4))])
    assert known.of([one])[0] < 0.4
    for _ in range(40):
        known.observe([(one, RowResult("a", (1,), 1, 4, (0, 0), (0, 0)))])
    assert known.of([one])[0] == pytest.approx(known.overall(greedy=True), abs=0.02)


def test_a_change_is_seen_within_twenty_steps() -> None:
    rng = Random(2)
    known = AcceptanceRates()
    one = sequence("one")
    for _ in range(100):
        known.observe([(one, step(rng, 0.95, 4))])
    for _ in range(20):
        known.observe([(one, step(rng, 0.0, 4))])
    assert known.of([one])[0] < 0.4


def test_each_step_fades_the_past_by_the_same_share() -> None:
    """So a batch of several steps counts as those steps one by one that saw nothing before it."""
    known, one, two = AcceptanceRates(), sequence("one"), sequence("two")
    for row in (one, two):
        known.observe([(row, RowResult("a", (), 1, 9, (3, 2), (4, 3)))])
    assert (one.tried, one.agreed) == (7, 5)
    known.observe([(one, RowResult("a", (), 3))])
    for _ in range(3):
        known.observe([(two, RowResult("a", (), 1))])
    assert (one.tried, one.agreed) == pytest.approx((two.tried, two.agreed))
    assert one.agreed / one.tried == pytest.approx(5 / 7)
    assert one.tried < 7


def test_a_class_weighs_all_its_tries_alike_until_it_forgets() -> None:
    known, one = AcceptanceRates(), sequence("one")
    for accepted in (10, 0, 20):
        known.observe([(one, RowResult("a", (), 1, 9, (accepted,), (20,)))])
    guessed = known.overall(greedy=False)
    assert guessed == pytest.approx(FIRST_GUESS), "of another class nothing is known"
    assert known.overall(greedy=True) == pytest.approx((30 + 4 * FIRST_GUESS) / (60 + 4))
    for _ in range(40):
        known.observe([(one, RowResult("a", (), 1, 9, (0,), (int(CLASS_TRIES),)))])
    assert known.overall(greedy=True) < 1e-6, "it has forgotten"


chances = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6)), min_size=1, max_size=5)


@given(chances, st.lists(st.floats(1e-4, 1.0), min_size=7, max_size=7))
def test_goodput_is_expected_tokens_over_seconds(
    rows: list[tuple[float, int]], seconds: list[float]
) -> None:
    """Of k draft tokens a row with acceptance a commits 1 + a + ... + a^k, within its limit."""
    acceptances, limits = [list(column) for column in zip(*rows, strict=True)]
    likely = likelihoods(acceptances, limits, 6)
    assert [len(share) for share in likely] == [len(rows)] * 6
    found = goodputs(likely, len(rows), seconds)
    for k, (goodput, spent_s) in enumerate(zip(found, seconds, strict=True)):
        tokens = sum(a**j for a, limit in rows for j in range(min(k, limit) + 1))
        assert goodput == pytest.approx(tokens / spent_s)
