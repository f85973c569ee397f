"""Proves what two batches are expected to take that take turns, and when that pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.shared.linear import LinearCost
from scheduler.draft_length.latency import LatencyTable
from scheduler.draft_length.policy import StepPlan
from scheduler.messages import TriedBatch
from tests.scheduler.draft_length.pair import Pair, policy_for, rows_of


@pytest.mark.parametrize("slowdown", [1.0, 2.0])
def test_of_batches_that_take_turns_the_busier_device_decides_or_half_of_the_whole_round(
    slowdown: float,
) -> None:
    table = LatencyTable()
    table.slowdown = slowdown
    for tokens in (4, 8, 12, 16, 20):
        table.step.observe(tokens, 0, 2e-3, tokens)
    table.draft.observe(4, 0, 1e-3, 1)
    for idle_s, expected_ms in (
        (0.0, [2.0, 2.0, 2.0, 3.0, 4.0]),
        (4e-3 * slowdown, [3.0, 3.5, 4.0, 4.5, 5.0]),
    ):
        found = table.turns_s(4, 4, 0, idle_s)
        assert found == pytest.approx([1e-3 * slowdown * ms for ms in expected_ms])


@pytest.mark.parametrize(("draft_s", "pay"), [(1e-9, False), (1e-3, False), (2.5e-3, True)])
def test_turns_pay_where_a_draft_takes_as_long_as_a_check_though_both_halves_read_weights_again(
    draft_s: float, pay: bool
) -> None:
    """A check of 8 rows of 100 tokens takes 2.5 ms, one of 16 takes 4 ms."""
    pair = Pair(LinearCost(draft_s), LinearCost(1e-3, kv_s=1.5e-3 / 800), acceptance=1.0)

    def seen(rows: int, length: int) -> TriedBatch:
        batch, result = pair.answer(rows_of(rows), StepPlan([1] * rows, 1))
        batch = replace(batch, rows=tuple(replace(row, length=length) for row in batch.rows))
        return batch, replace(result, times=pair.times(batch))

    tried = tuple(seen(rows, length) for rows in (8, 16) for length in (100, 400) for _ in range(2))
    policy = policy_for(None, tried, draft_len=1)
    assert policy.turns_pay("r", rows_of(8), 16, 8) == pay


@pytest.mark.parametrize(
    ("acceptance", "settings", "most", "pay"),
    [
        (1.0, {}, 5, True),
        (1.0, {}, 4, False),
        (0.6, {}, 8, False),
        (0.6, {"draft_len": 5}, 8, True),
    ],
)
def test_turns_pay_by_the_draft_lengths_that_are_best_for_each_or_by_the_one_that_is_fixed(
    acceptance: float, settings: dict[str, int], most: int, pay: bool
) -> None:
    """Of 16 rows, two halves with k draft tokens are faster than all by (16 * (k + 1) * t + F + k *
    d) / (2 * (8 * (k + 1) * t + F)): by 6 % at k = 5, not at all at 4."""
    pair = Pair(LinearCost(1e-3), LinearCost(4e-3, 1e-4), acceptance)
    spec = {"acceptance": acceptance, "draft_len_max": most}
    policy = policy_for(pair, spec=spec, **settings)
    assert policy.turns_pay("r", rows_of(8), 16, 8) == pay


def test_turns_pay_only_where_it_is_known_what_a_draft_takes() -> None:
    """Though half of the rows take a tenth of the time."""
    assert not policy_for(None).turns_pay("r", rows_of(8), 16, 8)
    steep = Pair(LinearCost(1e-3), LinearCost(-18e-3, 2.5e-3), acceptance=0.6)
    tried = tuple(steep.answer(rows_of(rows), StepPlan([0] * rows, 1)) for rows in (8, 16))
    assert not policy_for(None, tried).turns_pay("r", rows_of(8), 16, 8)


def test_a_batch_in_turns_drafts_what_a_check_hides() -> None:
    """Five passes of 2 ms beside a check of 10 ms; alone two pay."""
    policy = policy_for(
        Pair(LinearCost(2e-3), LinearCost(10e-3), acceptance=0.6), spec={"acceptance": 0.6}
    )
    policy.plan("r", rows_of(8), 1)
    assert policy.estimates("r").draft_len == 2
    policy.plan("r", rows_of(8), 1, in_turns=True)
    assert policy.estimates("r").draft_len == 5
