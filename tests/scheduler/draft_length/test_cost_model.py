"""Proves that the cost model finds the times that lie behind what a replica reports."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.draft_length.cost_model import AT_ONCE, CostModel, filled_tokens, prefilled_in
from scheduler.draft_length.estimates import LinearCost
from scheduler.draft_length.fit import CELLS_MAX, LATER, RATIO_MOST, Fit, tokens_key
from scheduler.messages import (
    Batch,
    BatchKind,
    PrefillRow,
    PrefillTiming,
    RowResult,
    SamplingParams,
    StepResult,
    StepRow,
    StepTimes,
    StepTiming,
)

parts = st.floats(0.0, 1.0).map(lambda share: share * 1e-3)


def work(rng: Random) -> tuple[int, int]:
    """(tokens, KV positions) of a step of some rows."""
    rows = rng.choice([1, 2, 4, 8, 16])
    return rows * rng.randint(1, 9), rows * rng.randint(16, 512)


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-3, 2e-2), parts, parts, st.integers(0, 2**32))
def test_the_parts_of_a_linear_cost_are_found(
    fixed_s: float, token_s: float, kv_s: float, seed: int
) -> None:
    rng = Random(seed)
    truth = LinearCost(fixed_s, token_s, kv_s * 1e-2)
    fit = Fit()
    for _ in range(200):
        tokens, kv = work(rng)
        fit.observe(tokens, kv, truth(tokens, kv))
    for _ in range(20):
        tokens, kv = work(rng)
        assert fit.cost()(tokens, kv) == pytest.approx(truth(tokens, kv), rel=0.05)


def test_noise_and_hiccups_move_it_little() -> None:
    rng = Random(1)
    truth = LinearCost(10e-3, 3e-4, 1e-6)
    fit = Fit()
    for _ in range(600):
        tokens, kv = work(rng)
        hiccup = 30.0 if rng.random() < 0.02 else 1.0
        fit.observe(tokens, kv, truth(tokens, kv) * rng.uniform(0.8, 1.2) * hiccup)
    for tokens, kv in ((8, 800), (40, 1600), (72, 2000), (1, 100)):
        assert fit.cost()(tokens, kv) == pytest.approx(truth(tokens, kv), rel=0.15)


def test_a_cost_that_changes_is_followed() -> None:
    rng = Random(2)
    fit = Fit()
    for factor in (1.0, 3.0):
        for _ in range(400):
            tokens, kv = work(rng)
            fit.observe(tokens, kv, factor * (5e-3 + 1e-4 * tokens))
    assert fit.cost()(40, 1600) == pytest.approx(27e-3, rel=0.1)


@pytest.mark.parametrize("slower", [0.6, 1.6])
def test_a_machine_whose_speed_changes_makes_no_kind_of_work_dearer_than_others(
    slower: float,
) -> None:
    """Only some work goes on being seen; what the other takes is known from it."""
    truth, rng, fit = LinearCost(0.003, 8e-5, 4e-7), Random(5), Fit()

    def see(tokens: int, kv: int, times: float) -> None:
        fit.observe(tokens, kv, times * rng.uniform(0.95, 1.05) * truth(tokens, kv))
        fit.cost()

    for _ in range(20):
        for tokens in (8, 16, 24, 32, 48):
            see(tokens, rng.choice((500, 1000, 2000)), 1.0)
    for _ in range(100):
        see(rng.choice((24, 32)), rng.choice((500, 1000, 2000)), slower)
    cost = fit.cost()
    for tokens in (8, 24, 32, 48):
        for kv in (500, 2000):
            assert cost(tokens, kv) == pytest.approx(slower * truth(tokens, kv), rel=0.1)
    step = cost(48, 1000) / cost(24, 1000)
    assert step == pytest.approx(truth(48, 1000) / truth(24, 1000), rel=0.07)


def test_work_that_alone_takes_longer_does_not_stay_everybodys() -> None:
    """What was put down to the machine is taken back by the other work that is seen."""
    truth, fit = LinearCost(0.003, 8e-5, 0.0), Fit()
    for round_no in range(120):
        for tokens in (8, 32):
            times = 2.0 if tokens == 32 and round_no >= 20 else 1.0
            fit.observe(tokens, 0.0, times * truth(tokens, 0))
    cost = fit.cost()
    assert cost(8, 0) == pytest.approx(truth(8, 0), rel=0.02)
    assert cost(32, 0) == pytest.approx(2 * truth(32, 0), rel=0.02)


def test_a_time_that_rises_in_steps_is_known_where_it_was_seen() -> None:
    """Whole tiles of 32 tokens: a line through them is a fifth off, on either side of a step."""

    def seconds(tokens: int) -> float:
        return 4e-3 + 4e-3 * math.ceil(tokens / 32)

    rng = Random(3)
    fit = Fit()
    seen = (8, 16, 24, 32, 40, 48, 64, 72)
    for _ in range(400):
        tokens = rng.choice(seen)
        fit.observe(tokens, 1000, seconds(tokens) * rng.uniform(0.95, 1.05))
    line = fit.cost()
    off = [line(tokens, 1000) / seconds(tokens) for tokens in seen]
    assert max(off) > 1.15 or min(off) < 0.85, "the example has no steps"
    for tokens in seen:
        found = fit.ratios[tokens_key(tokens)] * line(tokens, 1000)
        assert found == pytest.approx(seconds(tokens), rel=0.05)
    assert tokens_key(1000) not in fit.ratios


def test_what_was_seen_seldom_is_priced_near_the_line() -> None:
    fit = Fit()
    for _ in range(100):
        for tokens in (8, 16, 32, 64):
            fit.observe(tokens, 0, 1e-3 * tokens)
    fit.observe(45, 0, 2.0 * 45e-3)
    for _ in range(400):  # learned by now
        fit.observe(16, 0, 16e-3)
    line = fit.cost()
    assert 1.1 < fit.ratios[tokens_key(45)] < 1.5
    assert line(45, 0) == pytest.approx(45e-3, rel=0.1)


def test_of_the_first_two_times_the_lesser_counts() -> None:
    for first, second in ((9.0, 1.0), (1.0, 9.0)):
        fit = Fit()
        for _ in range(20):
            for tokens in (8, 16, 64):
                fit.observe(tokens, 0, 1e-3 * tokens)
        for times in (first, second):
            fit.observe(32, 0, times * 32e-3)
        line = fit.cost()
        assert fit.ratios[tokens_key(32)] * line(32, 0) == pytest.approx(32e-3, rel=0.05)


def test_a_time_seen_once_is_doubted_after_a_while_and_hoped_to_be_less() -> None:
    fit = Fit()
    at = tokens_key(45)

    def see(times: int) -> None:
        for _ in range(times):
            for tokens in (8, 32, 64):
                fit.observe(tokens, 0, 1e-3 * tokens)
        fit.cost()

    see(20)
    fit.observe(45, 0, 2.0 * 45e-3)
    see(5)
    assert fit.hopes()[at] == fit.ratios[at] > 1.2
    see(LATER)
    assert fit.is_new(45)
    assert fit.hopes()[at] < 1.0 < fit.ratios[at]
    fit.observe(45, 0, 2.0 * 45e-3)
    see(LATER)
    assert not fit.is_new(45), "it was no chance"
    assert fit.hopes()[at] == fit.ratios[at] > 1.4


def test_what_there_is_no_room_for_is_priced_by_what_it_took_once() -> None:
    fit = Fit()
    for _ in range(5):
        for tokens in (8, 16, 64):
            fit.observe(tokens, 100, 1e-3 * tokens)
        fit.observe(32, 100, 2.0 * 32e-3)
    fit.cost()
    ratio = fit.ratios[tokens_key(32)]
    for doubling in range(2 * CELLS_MAX):  # of KV positions: a cell each, or two to one
        for tokens in (8, 16, 64):
            fit.observe(tokens, 2.0 ** (doubling / 2), 1e-3 * tokens)
    fit.cost()
    assert fit.ratios[tokens_key(32)] == ratio > 1.3


def test_what_was_not_seen_is_hoped_to_take_as_little_as_it_can() -> None:
    """As long as what was seen of fewer tokens, up to an octave beyond the most."""
    fit = Fit()
    for _ in range(20):
        for tokens in (8, 40):
            fit.observe(tokens, 0, 1e-3 * tokens)
    line = fit.cost()
    seen, between, beyond = (tokens_key(tokens) for tokens in (8, 24, 60))
    assert fit.hopes()[seen] == fit.ratios[seen]
    assert fit.hopes()[between] * line(24, 0) == pytest.approx(8e-3, rel=0.15)
    assert fit.hopes()[beyond] * line(60, 0) == pytest.approx(40e-3, rel=0.15)
    assert not {between, beyond, tokens_key(200)} & fit.ratios.keys()
    assert tokens_key(200) not in fit.hopes()


def test_what_is_not_seen_any_more_is_still_known() -> None:
    """A thousand steps without drafting do not make it forget what drafting costs."""
    fit = Fit()
    for tokens in (8, 24, 40, 72):
        for _ in range(5):
            fit.observe(tokens, 800, 10e-3 + 3e-4 * tokens)
    for _ in range(1000):
        fit.observe(8, 800, 12.4e-3)
    assert fit.cost()(40, 800) == pytest.approx(22e-3, rel=0.05)


def test_what_was_seen_once_counts_as_fixed() -> None:
    fit = Fit()
    fit.observe(1, 100, 1.5e-3)
    cost = fit.cost()
    assert cost.fixed_s == pytest.approx(1.5e-3, rel=1e-3)
    assert cost(16, 3000) == pytest.approx(1.5e-3, rel=1e-2)


def test_no_part_is_ever_negative() -> None:
    fit = Fit()
    for tokens, seconds in ((8, 20e-3), (40, 10e-3), (72, 5e-3)):
        fit.observe(tokens, 10 * tokens, seconds)
    cost = fit.cost()
    assert min(cost.fixed_s, cost.token_s, cost.kv_s) >= 0.0
    assert cost(8, 80) > 0.0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.one_of(st.just(0.0), st.floats(0.0, 1e5)),
            st.floats(1e-9, 1e3),
        ),
        min_size=1,
        max_size=80,
    )
)
def test_whatever_is_seen_a_cost_stays_a_finite_number(
    seen: list[tuple[int, float, float]],
) -> None:
    fit = Fit()
    for tokens, kv, seconds in seen * 3:
        fit.observe(tokens, kv, seconds)
        cost = fit.cost()
        assert 0.0 <= cost(tokens, kv) < math.inf
        assert all(0.0 <= ratio <= RATIO_MOST for ratio in fit.ratios.values())
        assert all(0.0 <= ratio <= RATIO_MOST for ratio in fit.hopes().values())


def test_memory_is_bounded_and_what_took_no_time_is_ignored() -> None:
    fit = Fit()
    fit.observe(5, 5, 0.0)
    assert fit.kinds == 0
    assert fit.cost()(100, 100) == 0.0
    for tokens in range(1, 5000, 7):
        fit.observe(tokens, tokens, 1e-3)
    assert len(fit._begins) == CELLS_MAX


VERIFY = LinearCost(10e-3, 3e-4, 1e-6)
DRAFT = LinearCost(1e-3, 2e-5, 1e-7)


def answered(rows: int, draft_len: int, steps: int = 1) -> tuple[Batch, StepResult]:
    """A batch of rows with 100 tokens, and its result on a replica with the times above."""
    batch = Batch(
        1,
        "r",
        BatchKind.SPECULATE,
        rows=tuple(StepRow(str(i), 100, draft_len, 10) for i in range(rows)),
        draft_len=draft_len,
        steps=steps,
    )
    kv = rows * (100 + draft_len)
    verify_s = steps * VERIFY(rows * (draft_len + 1), kv)
    draft_s = steps * draft_len * DRAFT(rows, kv)
    result = StepResult(
        1,
        "r",
        tuple(RowResult(row.sequence_id, (), steps, steps * draft_len) for row in batch.rows),
        steps,
        StepTimes(0.0, draft_s, verify_s, draft_s + verify_s + steps * 5e-4),
        kv_positions_read=steps * kv,
    )
    return batch, result


def test_a_steps_time_is_the_sum_of_its_parts() -> None:
    model = CostModel()
    assert not model.known
    for rows in (1, 4, 8):
        for draft_len in (0, 2, 4, 8):
            model.observe(*answered(rows, draft_len, steps=2))
    assert model.known
    for rows, draft_len in ((8, 3), (1, 6), (6, 0)):
        kv = rows * (100 + draft_len)
        expected = VERIFY(rows * (draft_len + 1), kv) + draft_len * DRAFT(rows, kv) + 5e-4
        assert model.step_s(rows, draft_len, 100) == pytest.approx(expected, rel=0.03)


def test_steps_are_learned_some_at_once_and_none_too_late() -> None:
    """The first ones at once, later ones never more than AT_ONCE or a share of those known late;
    and when all are learned the fit is that of one by one."""
    rng = Random(3)
    model, verify = CostModel(), Fit()
    behind = []
    for count in range(1, 40 * AT_ONCE + 1):
        batch, result = answered(rng.choice([1, 4, 8]), rng.choice([0, 2, 4, 8]))
        model.observe(batch, result)
        tokens = len(batch.rows) * (batch.draft_len + 1)
        verify.observe(tokens, result.kv_positions_read, result.times.verify_s)
        assert model.known or count < AT_ONCE
        waiting = len(model._unlearned)
        behind.append(waiting)
        assert waiting < AT_ONCE
        assert waiting * AT_ONCE <= count
        if not waiting:
            assert model._verify._cells == verify._cells
    assert not any(behind[:AT_ONCE])
    assert max(behind) == AT_ONCE - 1
    assert behind.count(0) > 40


def test_the_first_step_of_so_many_tokens_is_learned_at_once() -> None:
    """It was hoped to take less, and would be tried again and again."""
    model = CostModel()
    for _ in range(40 * AT_ONCE):
        for draft_len in (2, 4):
            model.observe(*answered(8, draft_len))
    before = model.prices(8, 100).hopes[tokens_key(8 * 8)]
    model.observe(*answered(8, 7))
    assert tokens_key(8 * 8) in model.prices(8, 100).ratios
    assert model.prices(8, 100).hopes[tokens_key(8 * 8)] > before


def test_what_trimming_takes_beside_the_passes_counts_for_trimmed_steps_alone() -> None:
    model = CostModel()
    for rows in (2, 4, 8):
        for draft_len in (0, 2, 4, 8):
            model.observe(*answered(rows, draft_len))
    before = model.step_s(8, 4, 100)
    assert model.step_s(8, 4, 100, verify_tokens=32) >= before, "nothing is known of it yet"
    for rows in (2, 4, 8):
        for draft_len in (2, 4, 8):
            batch, result = answered(rows, draft_len)
            batch = replace(batch, verify_tokens=rows * draft_len // 2)
            times = replace(result.times, total_s=result.times.total_s + 2e-3)
            model.observe(batch, replace(result, times=times))
    assert model.step_s(8, 4, 100) == pytest.approx(before, rel=1e-6)
    # The trimmed results above claim the whole verification's time.
    expected = VERIFY(40, 832) + 4 * DRAFT(8, 832) + 5e-4 + 2e-3
    assert model.step_s(8, 4, 100, verify_tokens=16) == pytest.approx(expected, rel=0.03)


def test_trial_steps_of_a_replica_are_as_good_as_batches() -> None:
    trials = []
    for rows in (1, 8):
        for draft_len in (0, 4):
            kv = rows * (100 + draft_len)
            trials.append(
                StepTiming(
                    rows,
                    draft_len,
                    kv,
                    draft_len * DRAFT(rows, kv),
                    VERIFY(rows * (draft_len + 1), kv),
                    1e-4,
                )
            )
    model = CostModel(trials)
    assert model.known
    expected = VERIFY(24, 816) + 2 * DRAFT(8, 816) + 1e-4
    assert model.step_s(8, 2, 100) == pytest.approx(expected, rel=0.05)


def test_a_prefill_is_fitted_by_what_it_fills() -> None:
    model = CostModel()
    for count in (10, 100, 500):
        rows = (PrefillRow("a", (1,) * (count + 1), 5, SamplingParams(), (), 99),)
        batch = Batch(1, "r", BatchKind.PREFILL, prefill=rows)
        times = StepTimes(prefill_s=2e-3 + 1e-4 * count, total_s=1.0)
        model.observe(batch, StepResult(1, "r", (RowResult("a"),), times=times))
    assert model.prefill(200, 0) == pytest.approx(22e-3, rel=0.02)


def test_a_prefill_costs_what_it_filled_also_where_more_was_found_than_asked_for() -> None:
    model = CostModel()
    for fill, found in ((100, 0), (300, 0), (500, 400), (64, 640), (0, 0)):
        row = PrefillRow("a", (1,) * 1000, 1, SamplingParams(), (), 70, until=fill)
        batch = Batch(1, "r", BatchKind.PREFILL, prefill=(row,))
        seconds = 2e-3 + 1e-5 * max(fill - found, 0)
        result = StepResult(1, "r", (RowResult("a", reused=found),), 0, StepTimes(seconds, 0, 0, 1))
        model.observe(batch, result)
        assert filled_tokens(batch, result) == max(fill - found, 0)
    assert model.prefill(200, 0) == pytest.approx(4e-3, rel=0.03)


def test_a_prefill_is_fitted_by_what_it_fills_and_by_what_was_filled_before() -> None:
    truth = LinearCost(2e-3, 1e-4, 1e-7)
    model = CostModel([PrefillTiming(tokens, truth(tokens, 0)) for tokens in (64, 256)])
    assert model.prefill(500, 0) == pytest.approx(truth(500, 0), rel=0.02)
    for begin, row in ((4000, "a"), (20_000, "b"), (9000, "c")):
        rows = (PrefillRow(row, (), 5, SamplingParams(), (), 99, begin, begin + 300),)
        batch = Batch(1, "r", BatchKind.PREFILL, prefill=rows)
        times = StepTimes(prefill_s=truth(300, 300 * begin))
        model.observe(batch, StepResult(1, "r", (RowResult(row),), times=times))
    for begin in (0, 10_000):
        expected = truth(500, 500 * begin)
        assert model.prefill(500, 500 * begin) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("cost", [LinearCost(2e-3, 1e-4), LinearCost(2e-3, 1e-4, 1e-7)])
@pytest.mark.parametrize("begin", [0, 5000])
def test_what_is_filled_in_a_time_takes_that_time(cost: LinearCost, begin: int) -> None:
    tokens = prefilled_in(0.05, begin, cost)
    assert cost(tokens, tokens * begin) == pytest.approx(0.05)
    assert prefilled_in(1e-3, begin, cost) == 0.0, "less than the fixed cost"


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("apart", [False, True])
def test_what_pads_a_bucket_is_no_part_of_what_a_group_costs(apart: bool, steps: int) -> None:
    """A price is asked for rows and lengths: it is the same whether the replica reports what its
    fixed shapes, or kernels of whole blocks, read besides or not."""

    def learned(padding: float) -> CostModel:
        model = CostModel(reads_apart=apart)
        for number in range(60):
            rows, k, longest = 1 + number % 8, number % 5, 100 + 37 * (number % 11)
            # One long row among short ones, which a group in place is not priced by.
            lengths = [20] * (rows - 1) + [longest]
            own = sum(lengths) + rows * k
            kv = own if apart else rows * (longest + k)
            draft_s, verify_s = k * DRAFT(rows, kv), VERIFY(rows * (k + 1), kv)
            batch = Batch(
                number,
                "r",
                BatchKind.SPECULATE,
                rows=tuple(StepRow(str(row), length, k, 99) for row, length in enumerate(lengths)),
                draft_len=k,
                steps=steps,
            )
            results = tuple(RowResult(str(row), (), steps, steps * k) for row in range(rows))
            total_s = draft_s + verify_s + 1e-4
            times = StepTimes(0.0, steps * draft_s, steps * verify_s, steps * total_s)
            read = round(padding * kv)
            result = StepResult(number, "r", results, steps, times, steps * own, steps * read)
            model.observe(batch, result)
        return model

    assert learned(1.4).step_s(4, 3, 300) == learned(1.0).step_s(4, 3, 300)
    kv = 4 * 303
    expected = VERIFY(16, kv) + 3 * DRAFT(4, kv) + 1e-4
    assert learned(1.4).step_s(4, 3, 300) == pytest.approx(expected, rel=0.05)
