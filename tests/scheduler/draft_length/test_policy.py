"""Proves that the draft length is that of the greatest goodput, and looking for it cheap."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.shared.linear import Cost, LinearCost, LinearTimes
from scheduler.config import PREFILL_TOKENS_LEAST, SchedulerConfig
from scheduler.draft_length.policy import PROBE_SAVED, PROBE_SHARE, DraftPolicy, StepPlan
from scheduler.messages import (
    Batch,
    BatchKind,
    PrefillRow,
    ReplicaSpec,
    Request,
    Sampling,
    StepResult,
    StepRow,
    StepTimes,
    TriedBatch,
)
from scheduler.simulation.simulated_replica import Resident
from scheduler.state.sequence import Answer, Sequence

LENGTH = 100


class Pair:
    """A replica's true times and a draft's true acceptance; rows of LENGTH tokens."""

    def __init__(self, draft: Cost, verify: Cost, acceptance: float) -> None:
        self.times = LinearTimes(draft, verify, LinearCost(0.0))
        self.acceptance = acceptance
        self.rng = Random(0)

    def step_s(self, rows: int, draft_len: int) -> float:
        return self.times(batch_of(rows_of(rows), draft_len, 1)).total_s

    def goodput(self, rows: int, draft_len: int) -> float:
        expected = sum(self.acceptance**j for j in range(draft_len + 1))
        return rows * expected / self.step_s(rows, draft_len)

    def trials(self) -> tuple[TriedBatch, ...]:
        return tuple(
            self.answer(rows_of(rows), StepPlan([draft_len] * rows, 1))
            for rows in (1, 4, 16)
            for draft_len in (0, 2, 8)
            for _ in range(3)
        )

    def answer(self, rows: list[Sequence], plan: StepPlan) -> TriedBatch:
        residents = []
        for row in rows:
            admitted = PrefillRow(row.id, (), 1, Sampling(), (), 0)
            resident = Resident(admitted, self.acceptance, 0, LENGTH, 0, tokens_left=10_000)
            resident.begin(plan.draft_len)
            for _ in range(plan.steps):
                resident.step(plan.draft_len, self.rng, vocab_size=100)
            residents.append(resident)
        results = tuple(one.result(plan.steps) for one in residents)
        batch = batch_of(rows, plan.draft_len, plan.steps)
        one = self.times(batch)
        draft_s, verify_s = plan.steps * one.draft_s, plan.steps * one.verify_s
        times = StepTimes(0.0, draft_s, verify_s, draft_s + verify_s)
        return batch, StepResult(1, "r", results, plan.steps, times)

    def turn(
        self,
        policy: DraftPolicy,
        rows: list[Sequence],
        batches: int,
        steps_most: int = 1,
        round_trip_s: float | None = None,
    ) -> tuple[float, int]:
        """Time and tokens of so many batches of these rows."""
        seconds, tokens = 0.0, 0
        for _ in range(batches):
            batch, result = self.answer(rows, policy.plan("r", rows, steps_most))
            policy.observe(batch, result, answers(rows, result), round_trip_s)
            seconds += result.times.total_s
            tokens += sum(len(row.tokens) for row in result.rows)
        return seconds, tokens


def batch_of(rows: list[Sequence], draft_len: int, steps: int) -> Batch:
    step_rows = tuple(StepRow(row.id, LENGTH, draft_len, 99) for row in rows)
    return Batch(1, "r", BatchKind.SPECULATE, (), step_rows, draft_len, steps)


def answers(rows: list[Sequence], result: StepResult) -> list[Answer]:
    return list(zip(rows, result.rows, strict=True))


def rows_of(count: int, draft_len: int | None = None) -> list[Sequence]:
    prompt = (1,) * LENGTH
    return [Sequence(Request(str(i), prompt, 10_000, draft_len=draft_len), i) for i in range(count)]


def policy_for(
    pair: Pair | None,
    tried: tuple[TriedBatch, ...] = (),
    spec: dict[str, int | None] | None = None,
    **settings: int | None,
) -> DraftPolicy:
    """A policy that knows the pair's times, or nothing, and what else the replica says."""
    policy = DraftPolicy(SchedulerConfig(**{"rows_max": 8, **settings}))
    trials = (*(pair.trials() if pair else ()), *tried)
    policy.joined("r", ReplicaSpec(1000, 16, 10_000, 100, trials=trials, **(spec or {})))
    return policy


CHEAP = LinearCost(1e-3, 1e-5, 1e-8)
TARGET = LinearCost(10e-3, 3e-4, 1e-7)


def reached(pair: Pair, policy: DraftPolicy, rows: list[Sequence], goodputs: list[float]) -> float:
    """The mean goodput of the draft lengths of the next 200 batches."""
    chosen = []
    for _ in range(200):
        pair.turn(policy, rows, 1)
        chosen.append(goodputs[policy.estimates("r").draft_len])
    return fmean(chosen)


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


def prefill(begin: int, count: int, seconds: float) -> TriedBatch:
    """So many positions behind `begin` others took that long."""
    rows = (PrefillRow("p", (), 9, Sampling(), (), 999, begin, begin + count),)
    batch = Batch(2, "r", BatchKind.PREFILL, prefill=rows)
    return batch, StepResult(2, "r", (), times=StepTimes(prefill_s=seconds))


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


def test_estimates_tell_what_was_measured() -> None:
    """Of a step as it was chosen, also where a request asks for another draft length."""
    pair = Pair(CHEAP, TARGET, acceptance=0.8)
    policy = policy_for(pair)
    pair.turn(policy, rows_of(8), 200)
    policy.plan("r", [*rows_of(7), *rows_of(1, draft_len=8)], 1)
    found = policy.estimates("r")
    assert found.acceptance_greedy == pytest.approx(0.8, abs=0.08)
    assert found.step_s == pytest.approx(pair.step_s(8, found.draft_len), rel=0.05)
    assert found.draft_len < 8


def test_a_prefill_chunk_takes_a_steps_time_but_only_where_rows_step() -> None:
    """And is smaller the more lies before it, once it was seen what that costs; but never smaller
    than the least, though a step takes less time than that."""
    pair = Pair(CHEAP, TARGET, acceptance=0.0)

    def tried(truth: LinearCost) -> DraftPolicy:
        """Of a replica that has tried steps and prefills."""
        prefills = tuple(prefill(0, tokens, truth(tokens, 0)) for tokens in (16, 64, 256))
        policy = policy_for(pair, prefills, draft_len=0)
        pair.turn(policy, rows_of(8), 1)
        return policy

    for token_s in (1.1e-3, 1.2e-3, 1.3e-3):
        assert pair.step_s(8, 0) < token_s * PREFILL_TOKENS_LEAST
        slow = tried(LinearCost(0.0, token_s))
        assert slow.prefill_tokens("r", 8, 2048) == PREFILL_TOKENS_LEAST
    truth = LinearCost(1e-3, 1e-4, 1e-8)
    policy = policy_for(pair, draft_len=0)
    assert policy.prefill_tokens("r", 4, 2048) == 2048, "as long as nothing is known"
    policy = tried(truth)
    first = policy.prefill_tokens("r", 8, 2048)
    assert truth(first, 0) == pytest.approx(pair.step_s(8, 0), rel=0.1)
    wider = policy.prefill_tokens("r", 2, 2048)
    assert truth(wider, 0) == pytest.approx(4 * pair.step_s(8, 0), rel=0.1), "a quarter full"
    assert policy.prefill_tokens("r", 8, 50) == 50
    assert policy.prefill_tokens("r", 0, 2048) == 2048
    for begin in (first, 4000, 9000):
        policy.observe(*prefill(begin, 64, truth(64, 64 * begin)), [], None)
    deep = policy.prefill_tokens("r", 8, 2048, begin=9000)
    assert truth(deep, 9000 * deep) == pytest.approx(pair.step_s(8, 0), rel=0.1)
    assert deep < 0.8 * first
