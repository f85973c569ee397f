"""Proves what a round trip decides: how many steps a batch has, how long a draft is, and whether
rows wait for a prefill."""

from __future__ import annotations

import math

import pytest

from benchmarks.shared.linear import LinearCost
from scheduler.draft_length.policy import GAP_SHARE, ROUND_TRIP_RATE, ROUND_TRIP_SHARE, StepPlan
from scheduler.messages import RowResult, StepResult
from tests.scheduler.draft_length.pair import (
    CHEAP,
    TARGET,
    Pair,
    policy_for,
    prefill,
    reached,
    rows_of,
)


@pytest.mark.parametrize(
    ("round_trip_s", "step_s", "steps"),
    [(0.0, 0.01, 1), (0.9e-3, 0.01, 5), (1e-3, 0.2, 1), (9e-3, 1e-3, 8)],
)
def test_a_batch_gets_the_steps_that_its_round_trip_asks_for(
    round_trip_s: float, step_s: float, steps: int
) -> None:
    pair = Pair(CHEAP, LinearCost(step_s), acceptance=0.0)
    policy = policy_for(pair, draft_len=0)
    rows = rows_of(2)
    assert policy.plan("r", rows, 8).steps == 8, "as long as nothing is known of the round trip"
    for _ in range(3):
        batch, result = pair.answer(rows, policy.plan("r", rows, 1))
        policy.observe(batch, result, [], round_trip_s)
    assert policy.plan("r", rows, 8).steps == steps
    assert policy.plan("r", rows, 1).steps == 1


@pytest.mark.parametrize("round_trips", [(5e-3, 0.9e-3), (0.9e-3, 5e-3)])
def test_of_round_trips_the_shortest_lately_counts(round_trips: tuple[float, float]) -> None:
    """One that is longer by chance moves it little; one that is shorter at once."""
    pair = Pair(CHEAP, LinearCost(10e-3), acceptance=0.0)
    policy = policy_for(pair, draft_len=0)
    rows = rows_of(2)
    for round_trip_s in round_trips:
        batch, result = pair.answer(rows, policy.plan("r", rows, 1))
        policy.observe(batch, result, [], round_trip_s)
    steps = policy.plan("r", rows, 50).steps
    shortest_s = min(round_trips)
    longer_s = shortest_s + ROUND_TRIP_RATE * (round_trips[-1] - shortest_s)
    step_s = ROUND_TRIP_SHARE * 10e-3
    assert math.ceil(shortest_s / step_s) <= steps <= math.ceil(longer_s / step_s)


def test_a_gap_is_short_once_a_round_trip_is_a_small_part_of_a_step() -> None:
    for share, short in ((0.5, True), (1.0, True), (1.1, False)):
        pair = Pair(LinearCost(0.0), LinearCost(0.5), acceptance=0.0)
        policy = policy_for(pair, draft_len=0)
        assert not policy.short_gap("r"), "nothing is known"
        rows = rows_of(2)
        batch, result = pair.answer(rows, policy.plan("r", rows, 1))
        policy.observe(batch, result, [], share * GAP_SHARE * 0.5)
        assert policy.short_gap("r") == short


@pytest.mark.parametrize("round_trip_s", [0.0, 20e-3, 0.2])
def test_the_goodput_counts_the_time_in_which_a_replica_waits_for_its_next_batch(
    round_trip_s: float,
) -> None:
    pair = Pair(LinearCost(2e-3), LinearCost(10e-3), acceptance=0.7)
    policy = policy_for(pair)
    rows = rows_of(8)
    pair.turn(policy, rows, 300, round_trip_s=round_trip_s)
    step_s = [pair.step_s(8, draft_len) for draft_len in range(9)]
    goodputs = [
        pair.goodput(8, draft_len) * spent_s / (spent_s + round_trip_s)
        for draft_len, spent_s in enumerate(step_s)
    ]
    assert reached(pair, policy, rows, goodputs) >= 0.97 * max(goodputs)


def test_of_a_round_trip_each_step_of_a_batch_has_its_share_and_a_single_step_all() -> None:
    """Of steps of 10 ms with drafts of 2 ms each: alone it is worth 5 draft tokens to wait for
    20 ms less often, and once a batch has some steps the 3 that are best without waiting."""
    pair = Pair(LinearCost(2e-3), LinearCost(10e-3), acceptance=0.7)
    policy = policy_for(pair, spec={"acceptance": 0.7})
    rows = rows_of(8)
    policy.observe(*pair.answer(rows, StepPlan([0] * 8, 1)), [], 20e-3)
    policy.plan("r", rows, 8)
    assert policy.estimates("r").draft_len == 5
    for _ in range(20):
        policy.observe(*pair.answer(rows, policy.plan("r", rows, 8)), [], 20e-3)
    assert policy.estimates("r").draft_len == 3


def test_what_a_prefill_or_a_batch_without_a_step_takes_is_no_round_trip_and_no_step() -> None:
    policy = policy_for(None, draft_len=0)
    rows = rows_of(1)
    policy.plan("r", rows, 8)
    policy.observe(*prefill(0, 64, 0.1), [], 1e-9)
    batch, result = Pair(CHEAP, TARGET, 0.0).answer(rows, StepPlan([0], 1))
    failed = StepResult(1, "r", (RowResult("0"),), times=result.times)
    policy.observe(batch, failed, [], 1e-9)
    assert policy.estimates("r").step_s == 0.0
    policy.observe(batch, result, [], None)
    assert policy.estimates("r").step_s > 0.0
    assert policy.plan("r", rows, 8).steps == 8, "nothing is known of round trips"
