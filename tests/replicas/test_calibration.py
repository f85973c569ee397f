"""Proves that a replica that was tried is as before, and that the pool learns from the trials."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from replicas.calibration import DRAFT_LENS, LENGTH, ROWS, calibrate
from scheduler.cost_model import CostModel
from scheduler.messages import Order, StepResult, StepTimes
from tests.tiny_pairs import tiny_replica


def test_few_and_many_rows_are_timed_with_and_without_drafting() -> None:
    replica = tiny_replica("llama")
    free = replica.free_blocks
    timings = calibrate(replica)
    assert {(one.rows, one.draft_len) for one in timings} == {
        (rows, draft_len) for rows in ROWS for draft_len in DRAFT_LENS
    }
    assert all(one.verify_s > 0 for one in timings)
    assert all((one.draft_s > 0) == (one.draft_len > 0) for one in timings)
    assert all(one.kv_read >= one.rows * LENGTH for one in timings)
    assert CostModel(timings).known
    assert replica.residents == ()
    assert replica.free_blocks == free
    replica.check_integrity()


def test_a_hiccup_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = tiny_replica("llama")
    step = replica.step
    orders = itertools.count()

    def hiccupping(order: Order) -> StepResult:
        result = step(order)
        slow = 100.0 if next(orders) % 4 == 0 else 1e-3
        times = StepTimes(0.0, order.draft_len * slow, slow, (order.draft_len + 2) * slow)
        return replace(result, times=times)

    monkeypatch.setattr(replica, "step", hiccupping)
    timings = calibrate(replica)
    assert len(timings) == len(ROWS) * len(DRAFT_LENS)
    for one in timings:
        parts = (one.draft_s, one.verify_s, one.rest_s)
        assert parts == pytest.approx((one.draft_len * 1e-3, 1e-3, 1e-3))


def test_a_replica_without_room_is_tried_as_far_as_it_goes() -> None:
    replica = tiny_replica("llama", kv_blocks=64)
    assert {one.rows for one in calibrate(replica)} == {1, 2}
    replica.spec = replace(replica.spec, rows_max=1)
    assert {one.rows for one in calibrate(replica)} == {1}
    replica.spec = replace(replica.spec, context_len=32)
    assert calibrate(replica) == ()


def test_trials_that_fail_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = tiny_replica("llama")
    monkeypatch.setattr(replica, "_speculate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate(replica)
    assert replica.residents == ()
    replica.check_integrity()
