"""Proves that other draft lengths are tried again, and that looking for them is cheap."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.shared.linear import LinearCost
from scheduler.draft_length.latency import STALE
from scheduler.draft_length.policy import PROBE_SAVED, PROBE_SHARE
from tests.scheduler.draft_length.pair import CHEAP, TARGET, Pair, answers, policy_for, rows_of


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9])
def test_probes_try_other_lengths_again_and_cost_their_share(acceptance: float) -> None:
    pair = Pair(CHEAP, TARGET, acceptance)
    policy = policy_for(pair)
    rows = rows_of(8)
    pair.turn(policy, rows, 200)
    best = max(pair.goodput(8, draft_len) for draft_len in range(9))
    tried: set[int] = set()
    spent_s = lost_s = 0.0
    for _ in range(2000):
        plan = policy.plan("r", rows, 1)
        batch, result = pair.answer(rows, plan)
        policy.observe(batch, result, answers(rows, result), None)
        step_s = pair.step_s(8, plan.draft_len)
        spent_s += step_s
        if plan.draft_len != policy.estimates("r").draft_len:
            tried.add(plan.draft_len)
            lost_s += step_s - step_s * pair.goodput(8, plan.draft_len) / best
    assert len(tried) > 1 or (tried == {1} and policy.estimates("r").draft_len == 0)
    assert lost_s <= (PROBE_SHARE + 0.002) * spent_s + PROBE_SAVED * pair.step_s(8, 0)


def test_a_probe_is_due_when_what_it_may_lose_is_saved_up() -> None:
    """And takes a single step; between probes the best length is drafted."""
    pair = Pair(CHEAP, TARGET, acceptance=0.0)
    policy = policy_for(pair)
    rows = rows_of(8)
    pair.turn(policy, rows, 300)
    probes = []
    for at in range(1000):
        plan = policy.plan("r", rows, 4)
        if plan.draft_len != policy.estimates("r").draft_len:
            probes.append(at)
            assert plan.steps == 1
        batch, result = pair.answer(rows, plan)
        policy.observe(batch, result, answers(rows, result), None)
    assert policy.estimates("r").draft_len == 0
    lost = 1 - pair.goodput(8, 1) / pair.goodput(8, 0)
    batches_between = lost * pair.step_s(8, 1) / (PROBE_SHARE * 4 * pair.step_s(8, 0))
    assert 0.5 * batches_between < 1000 / len(probes) < 3 * batches_between


def test_a_probe_that_makes_the_draft_catch_up_pays_for_it_from_what_is_saved() -> None:
    """So the next one is due later by what that took."""

    def until_a_probe(caught_up_s: float) -> int:
        pair = Pair(CHEAP, TARGET, acceptance=0.0)
        policy = policy_for(pair)
        rows = rows_of(8)
        pair.turn(policy, rows, 300)
        waits, probed = 0, False
        for _ in range(5000):
            plan = policy.plan("r", rows, 1)
            batch, result = pair.answer(rows, plan)
            if plan.draft_len and probed:
                return waits
            waits += probed
            if plan.draft_len:
                probed = True
                times = replace(result.times, prefill_s=caught_up_s)
                times = replace(times, total_s=times.total_s + caught_up_s)
                result = replace(result, times=times)
            policy.observe(batch, result, answers(rows, result), None)
        raise AssertionError("no second probe")

    step_s = Pair(CHEAP, TARGET, 0.0).step_s(8, 0)
    more = until_a_probe(3 * step_s) - until_a_probe(0.0)
    assert more == pytest.approx(3 / PROBE_SHARE, rel=0.1)


def test_every_draft_length_up_to_the_most_is_tried_again() -> None:
    """Where a short draft pays, and a long one loses little."""
    pair = Pair(LinearCost(1e-4), LinearCost(10e-3), acceptance=0.1)
    policy = policy_for(pair)
    rows, tried = rows_of(8), set[int]()
    pair.turn(policy, rows, 200)
    for _ in range(2 * STALE):
        plan = policy.plan("r", rows, 1)
        batch, result = pair.answer(rows, plan)
        policy.observe(batch, result, answers(rows, result), None)
        assert policy.estimates("r").draft_len in (1, 2)
        tried.add(plan.draft_len)
    assert tried == set(range(9))


def test_where_a_draft_pays_others_are_tried_once_they_are_stale_though_it_catches_up() -> None:
    """No length is tried more often, 1 neither; and only a probe pays for what it catches up."""
    pair = Pair(CHEAP, TARGET, acceptance=0.9)
    policy, rows, probes = policy_for(pair), rows_of(8), Counter[int]()
    for at in range(200 + 3 * STALE):
        plan = policy.plan("r", rows, 1)
        batch, result = pair.answer(rows, plan)
        caught_up = replace(result.times, prefill_s=10e-3, total_s=result.times.total_s + 10e-3)
        result = replace(result, times=caught_up)
        policy.observe(batch, result, answers(rows, result), None)
        if at >= 200 and plan.draft_len != policy.estimates("r").draft_len:
            probes[plan.draft_len] += 1
    assert policy.estimates("r").draft_len > 1
    assert probes
    assert max(probes.values()) <= 3
