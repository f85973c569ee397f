"""Proves that a sequence's acceptance is estimated from its own tries, at first from others'."""

from __future__ import annotations

from random import Random

import pytest

from scheduler.draft_length.acceptance import FIRST_GUESS, Acceptance
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
    known = Acceptance()
    easy, hard = sequence("easy"), sequence("hard")
    means = {id(easy): [], id(hard): []}
    for at in range(600):
        known.observe([(easy, step(rng, 0.9, 4))])
        known.observe([(hard, step(rng, 0.2, 4))])
        if at > 50:
            for one in (easy, hard):
                means[id(one)].append(known.of([one])[0])
    assert sum(means[id(easy)]) / len(means[id(easy)]) == pytest.approx(0.9, abs=0.1)
    assert sum(means[id(hard)]) / len(means[id(hard)]) == pytest.approx(0.2, abs=0.2)


def test_a_new_sequence_is_expected_to_be_like_the_others_of_its_class() -> None:
    rng = Random(1)
    known = Acceptance()
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
    known = Acceptance()
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
    known = Acceptance()
    one = sequence("one")
    for _ in range(100):
        known.observe([(one, step(rng, 0.95, 4))])
    for _ in range(20):
        known.observe([(one, step(rng, 0.0, 4))])
    assert known.of([one])[0] < 0.4
