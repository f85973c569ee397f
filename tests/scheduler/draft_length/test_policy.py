"""Proves that the draft length is that of the greatest goodput, and looking for it cheap."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.shared.linear import LinearCost
from scheduler.config import SchedulerConfig
from scheduler.draft_length.acceptance import FIRST_GUESS
from scheduler.draft_length.policy import FALLBACK, StepPlan, row_draft_len
from scheduler.messages import ReplicaSpec, RowResult, StepResult, StepTimes
from tests.scheduler.draft_length.pair import (
    CHEAP,
    TARGET,
    Pair,
    answers,
    policy_for,
    reached,
    rows_of,
)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.97]),
    st.sampled_from([1, 4, 8, 16]),
    st.floats(0.05, 1.0),
    st.floats(1e-5, 2e-3),
)
def test_the_draft_length_comes_to_the_greatest_goodput(
    acceptance: float, count: int, draft_share: float, token_s: float
) -> None:
    """Or near it: a single row's luck misleads for a while, where drafting hardly pays."""
    verify = LinearCost(10e-3, token_s, 1e-7)
    draft = LinearCost(draft_share * 10e-3, 1e-5, 1e-8)
    pair = Pair(draft, verify, acceptance)
    policy = policy_for(pair)
    rows = rows_of(count)
    pair.turn(policy, rows, 400)
    goodputs = [pair.goodput(count, draft_len) for draft_len in range(9)]
    least = 0.92 if count > 1 else 0.88
    assert reached(pair, policy, rows, goodputs) >= least * max(goodputs)


@pytest.mark.parametrize("times", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("acceptance", [0.6, 0.85])
def test_a_slow_first_run_bans_no_draft_length(times: float, acceptance: float) -> None:
    """The first of so many tokens takes longer: code is made for it. By that time alone the length
    that fills a tile would look bad, not be chosen, and never be timed again."""
    bound = LinearCost(10e-3, 1e-3, 1e-7)
    pair = Pair(CHEAP, bound, acceptance)
    seen: set[int] = set()

    def seconds(tokens: int, kv: int) -> float:
        return bound(32 * -(-tokens // 32), kv)

    def first_slow(tokens: int, kv: int) -> float:
        slow = times if tokens not in seen else 1.0
        seen.add(tokens)
        return slow * seconds(tokens, kv)

    pair.times.verify = seconds
    policy = policy_for(pair)
    goodputs = [pair.goodput(8, draft_len) for draft_len in range(9)]
    pair.times.verify = first_slow
    rows = rows_of(8)
    pair.turn(policy, rows, 1000)
    assert reached(pair, policy, rows, goodputs) >= 0.95 * max(goodputs)


def test_where_no_draft_pays_single_tokens_are_tried() -> None:
    """The cheapest way to see that acceptance comes back; longer drafts only for their times."""
    pair = Pair(CHEAP, TARGET, acceptance=0.0)
    policy, rows = policy_for(pair), rows_of(8)
    pair.turn(policy, rows, 300)
    tried = []
    for _ in range(3000):
        plan = policy.plan("r", rows, 1)
        tried.append(plan.draft_len)
        batch, result = pair.answer(rows, plan)
        policy.observe(batch, result, answers(rows, result), None)
    probes = [draft_len for draft_len in tried if draft_len]
    assert len(probes) >= 10
    assert probes.count(1) > 0.7 * len(probes)


def test_a_request_that_pins_a_long_draft_does_not_hide_that_drafting_pays_again() -> None:
    pair = Pair(CHEAP, TARGET, acceptance=0.0)
    policy = policy_for(pair)
    pair.turn(policy, rows_of(8), 200)
    pair.turn(policy, [*rows_of(7), *rows_of(1, draft_len=8)], 500)
    pair.acceptance = 0.95
    pair.turn(policy, rows_of(8), 600)
    assert policy.estimates("r").draft_len >= 4


def test_a_row_that_pins_its_draft_length_has_as_many_steps_per_batch_as_others() -> None:
    pair = Pair(CHEAP, TARGET, acceptance=0.3)
    policy = policy_for(pair)
    pair.turn(policy, rows_of(1), 40, steps_most=8, round_trip_s=2e-3)
    assert policy.estimates("r").draft_len < 8
    plan = policy.plan("r", rows_of(1, draft_len=8), 8)
    assert plan.draft_len == 8
    assert plan.steps > 1


def test_without_a_draft_steps_still_follow_their_times() -> None:
    slow = Pair(CHEAP, LinearCost(0.06), acceptance=0.0)
    policy = policy_for(None, slow.trials()[:1], spec={"draft_len_max": 0})
    rows = rows_of(2)
    slow.turn(policy, rows, 5, round_trip_s=0.1)
    assert policy.plan("r", rows, 8).steps == 1, "two of them would last too long"
    assert policy.estimates("r").step_s == pytest.approx(0.06, rel=0.1)


@pytest.mark.parametrize(
    ("server", "replica", "fixed"),
    [
        ({}, {"draft_len": 3}, 3),
        ({"draft_len": 2}, {"draft_len": 3}, 2),
        ({"draft_len": 5}, {"draft_len": 3}, 3),
        ({"draft_len": 3}, {}, 3),
        ({"draft_len": 0}, {}, 0),
        ({"draft_len_max": 0}, {}, 0),
        ({}, {"draft_len_max": 0}, 0),  # it has no draft
    ],
)
def test_a_server_or_a_replica_can_fix_the_draft_length(
    server: dict[str, int], replica: dict[str, int | None], fixed: int
) -> None:
    """A request drafts no more, neither for itself nor for those it steps with, and may draft
    less."""
    policy = policy_for(None, spec=replica, **server)
    pair = Pair(CHEAP, TARGET, acceptance=0.9)
    for _ in range(3):
        for rows in (rows_of(4), rows_of(2, draft_len=8), [*rows_of(3), *rows_of(1, draft_len=8)]):
            assert policy.plan("r", rows, 1).draft_len == fixed
        pair.turn(policy, rows_of(4), 1)
    less = policy.plan("r", [*rows_of(1), *rows_of(1, draft_len=1)], 1)
    assert less.draft_lens == [fixed, min(1, fixed)]


def test_a_request_can_pin_its_own_and_the_others_draft_along() -> None:
    pair = Pair(CHEAP, TARGET, acceptance=0.0)
    policy = policy_for(pair)
    pair.turn(policy, rows_of(8), 100)
    rows = [*rows_of(3), *rows_of(1, draft_len=5)]
    assert policy.plan("r", rows, 1).draft_len == 5
    rows = [*rows_of(3), *rows_of(1, draft_len=30)]
    assert policy.plan("r", rows, 1).draft_len == SchedulerConfig().draft_len_max
    assert policy.plan("r", rows_of(2, draft_len=0), 1).draft_len == 0
    rows = [*rows_of(1, draft_len=2), *rows_of(1, draft_len=5)]
    assert policy.plan("r", rows, 1).draft_lens == [2, 5], "each its own"


def test_estimates_tell_what_was_measured() -> None:
    """Of a step as it was chosen, also where a request asks for another draft length."""
    pair = Pair(CHEAP, TARGET, acceptance=0.8)
    policy = policy_for(pair)
    pair.turn(policy, rows_of(8), 200)
    policy.plan("r", [*rows_of(7), *rows_of(1, draft_len=8)], 1)
    found = policy.estimates("r")
    assert found.acceptance_greedy == pytest.approx(0.8, abs=0.08)
    assert found.acceptance_sampled == pytest.approx(FIRST_GUESS), "no row was sampled"
    assert found.step_s == pytest.approx(pair.step_s(8, found.draft_len), rel=0.05)
    assert found.draft_len < 8


def test_batches_of_several_steps_tell_as_much_of_a_step_as_single_ones() -> None:
    pair = Pair(CHEAP, TARGET, acceptance=0.8)
    policy = policy_for(None)
    policy.plan("r", rows_of(8), 1)
    for draft_len in (0, 2, 4, 8) * 6:
        batch, result = pair.answer(rows_of(8), StepPlan([draft_len] * 8, 4))
        policy.observe(batch, result, answers(rows_of(8), result), None)
    rows = rows_of(8)
    draft_len = policy.plan("r", rows, 1).draft_len
    found = policy.estimates("r")
    assert found.step_s == pytest.approx(pair.step_s(8, found.draft_len), rel=0.1)
    best = max(range(9), key=lambda k: pair.goodput(8, k))
    assert pair.goodput(8, found.draft_len) > 0.93 * pair.goodput(8, best), draft_len


def test_of_what_is_drafted_a_row_gets_no_more_than_it_may_commit_before_the_last_token() -> None:
    for left in range(1, 7):
        (row,) = rows_of(1)
        row.length = row.length_max - left
        assert row_draft_len(row, 4) == min(4, left - 1)
    for own in range(7):
        assert row_draft_len(rows_of(1, draft_len=own)[0], 4) == min(own, 4)


def test_what_is_not_known_is_zero_and_a_replica_begins_with_what_its_trial_showed() -> None:
    policy = policy_for(None)
    nothing = policy.estimates("r")
    assert (nothing.step_s, nothing.draft_len) == (0.0, FALLBACK)
    assert policy.plan("r", rows_of(2), 3).steps == 3
    assert policy.plan("r", rows_of(2), 3).draft_lens == [FALLBACK] * 2
    policy.joined("short", ReplicaSpec(10, 4, 99, 9, draft_len_max=FALLBACK - 1))
    assert policy.estimates("short").draft_len == FALLBACK - 1, "no more than it can propose"
    policy.joined("s", ReplicaSpec(10, 4, 99, 9, acceptance=0.25))
    assert policy.estimates("s").acceptance_greedy == 0.25
    assert policy.estimates("s").acceptance_sampled == 0.25
    policy.lost("s")
    with pytest.raises(KeyError):
        policy.estimates("s")


@pytest.mark.parametrize(("prefill_s", "hidden_s"), [(0.0, 0.0), (0.02, 0.0), (0.02, 5e-3)])
def test_of_a_batchs_time_a_step_is_its_drafts_and_its_check(
    prefill_s: float, hidden_s: float
) -> None:
    """Whatever the draft caught up, what of it passed beside other batches, and where a row drafts
    less or went no further."""
    policy = policy_for(None, draft_len=4)
    rows = rows_of(3)
    batch, _ = Pair(CHEAP, TARGET, 0.0).answer(rows, policy.plan("r", rows, 1))
    draft_s, verify_s = 4e-3, 10e-3
    total_s = prefill_s + draft_s + verify_s - hidden_s
    times = StepTimes(prefill_s, draft_s, verify_s, total_s, hidden_s)
    went = (RowResult("0", steps=1, asked_tokens=4), RowResult("1", steps=1), RowResult("2"))
    policy.observe(batch, StepResult(1, "r", went, 1, times), [], None)
    assert policy.estimates("r").step_s == pytest.approx(draft_s + verify_s)


def test_a_replica_that_tried_nothing_drafts_once_then_not_and_then_what_is_best() -> None:
    """Only both together tell what a draft token takes."""
    pair = Pair(CHEAP, TARGET, acceptance=1.0)
    policy = policy_for(None, spec={"acceptance": 1.0})
    rows, chosen = rows_of(8), []
    for _ in range(3):
        plan = policy.plan("r", rows, 1)
        chosen.append(policy.estimates("r").draft_len)
        batch, result = pair.answer(rows, plan)
        policy.observe(batch, result, answers(rows, result), None)
    assert chosen == [FALLBACK, 0, 8]
    undrafted = tuple(pair.answer(rows_of(count), StepPlan([0] * count, 1)) for count in (1, 8))
    policy = policy_for(None, undrafted, spec={"acceptance": 1.0})
    assert policy.plan("r", rows, 1).draft_len == FALLBACK


def test_a_row_at_its_end_keeps_no_other_from_drafting() -> None:
    policy = policy_for(Pair(CHEAP, TARGET, 0.9), spec={"acceptance": 0.9})
    rows = rows_of(8)
    rows[-1].length = rows[-1].length_max - 1
    *others, last = policy.plan("r", rows, 1).draft_lens
    assert last == 0
    assert min(others) > 0
    assert policy.plan("r", rows[-1:], 1).draft_lens == [0]
