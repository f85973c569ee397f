"""Proves that what a pool counts is what happened: usage of requests, figures of replicas, rates;
and that it keeps nothing of what has gone."""

from __future__ import annotations

import gc
from dataclasses import asdict
from types import FunctionType, ModuleType

import pytest

from scheduler.messages import BatchKind, Finish, RowResult, StepDone, StepResult, StepTimes, Usage
from scheduler.state.pool import RATE_S, RateMeter
from tests.scheduler.hand import Hand, of_kind


def test_the_usage_of_a_request_that_no_replica_took_is_nothing() -> None:
    assert not any(asdict(Usage()).values())


def test_usage_and_figures_are_sums_of_what_replicas_report() -> None:
    hand = Hand(draft_len=3, steps_per_batch_max=1)
    hand.join()
    hand.now_s = 2.0
    hand.submit("a", length=30, max_new_tokens=5)
    hand.submit("b", length=12, max_new_tokens=5)
    hand.now_s = 5.0
    prefilled = reused = 0
    while hand.in_flight()[0].kind is BatchKind.PREFILL:
        batch = hand.in_flight()[0]
        rows = tuple(RowResult(row.sequence_id, reused=8) for row in batch.prefill)
        prefilled += sum(row.end - 8 for row in batch.prefill)
        reused += 8 * len(rows)
        times = StepTimes(total_s=0.5, prefill_s=0.5)
        hand.tell(StepDone(StepResult(batch.id, "r", rows, times=times)))
    before = hand.scheduler.snapshot().replicas[0].figures
    assert (before.prefill_tokens, before.reused_tokens) == (prefilled, reused)
    assert (before.step_batches, before.steps) == (0, 0)
    assert (before.acceptance, before.spread_mean) == (0.0, 0.0), "though nothing can be divided"
    spread = row_steps = committed = batches = 0
    finishes = []
    while batch := next(iter(hand.in_flight()), None):
        batches += 1
        spread += batch.rows[-1].length - batch.rows[0].length
        row_steps += 2 * len(batch.rows)
        committed += 2 * len(batch.rows) - sum(row.length in (34, 16) for row in batch.rows)
        rows = tuple(RowResult(row.sequence_id, (1, 1), 2, 3, (1, 0), (2, 1)) for row in batch.rows)
        result = StepResult(batch.id, "r", rows, steps=2, times=StepTimes(total_s=0.25))
        finishes += of_kind(hand.tell(StepDone(result)), Finish)
    figures = hand.scheduler.snapshot().figures
    assert committed == figures.committed_tokens == 10
    assert (figures.step_batches, figures.steps) == (batches, 2 * batches)
    assert figures.batches == before.batches + batches
    assert figures.busy_s == pytest.approx(0.5 * before.batches + 0.25 * batches)
    assert (figures.row_steps, figures.spread_sum) == (row_steps, spread)
    assert (figures.draft_tokens, figures.accepted_tokens) == (3 * row_steps / 2, row_steps / 2)
    assert figures.acceptance == pytest.approx(1 / 3)
    assert figures.spread_mean == spread / batches
    for finish in finishes:
        usage = finish.usage
        assert (usage.cached_tokens, usage.completion_tokens, usage.steps) == (8, 5, 6)
        assert (usage.draft_tokens, usage.accepted_tokens, usage.accepted_at) == (9, 3, (3, 0))
        assert usage.replicas == ("r",)
    assert len(finishes) == 2


def test_cached_tokens_are_those_of_the_prompt_at_first() -> None:
    """Not those that were generated, nor those that a second replica finds."""
    hand = Hand(draft_len=0, steps_per_batch_max=1)
    hand.join("one")
    hand.submit("a", length=6, max_new_tokens=9)
    for name, reused in (("one", 4), ("two", 5)):
        (batch,) = hand.in_flight(name)
        row = RowResult("a", reused=reused)
        hand.tell(StepDone(StepResult(batch.id, name, (row,))))
        if name == "one":
            hand.lose("one", by_batch=False)
            hand.join("two")
    hand.work(20, "two")
    usage = hand.finishes["a"].usage
    assert (usage.cached_tokens, usage.recovered) == (4, 1)
    assert usage.replicas == ("one", "two")


def test_the_time_in_the_queue_is_that_until_a_replica_first_takes_it() -> None:
    hand = Hand(draft_len=0, steps_per_batch_max=1)
    hand.now_s = 3.0
    hand.submit("a", max_new_tokens=3)
    hand.now_s = 10.0
    hand.join("one")
    hand.now_s = 12.0
    hand.lose("one", by_batch=False)
    hand.now_s = 20.0
    hand.join("two")
    hand.work(9, "two")
    assert hand.finishes["a"].usage.queued_s == 7.0


def test_a_rate_is_that_of_the_last_seconds_and_ends_soon_after_them() -> None:
    meter = RateMeter()
    assert meter.per_s(1.0) == 0.0
    for tenth in range(400):
        meter.add(30, 0.1 * tenth)
    assert meter.per_s(39.9) == pytest.approx(300, rel=0.02)
    assert meter.per_s(39.9 + RATE_S) == pytest.approx(300 / 2.718, rel=0.02)
    assert meter.per_s(39.9 + 1.99 * RATE_S) > 0.0
    assert meter.per_s(39.9 + 2.01 * RATE_S) == 0.0


def kept(root: object) -> int:
    """How many objects can be reached from this one, code aside."""
    seen, todo = {id(root)}, [root]
    while todo:
        for referent in gc.get_referents(todo.pop()):
            if id(referent) not in seen and not isinstance(
                referent, type | ModuleType | FunctionType
            ):
                seen.add(id(referent))
                todo.append(referent)
    return len(seen)


def test_a_pool_keeps_nothing_of_replicas_and_requests_that_are_gone() -> None:
    hand = Hand(draft_len=0, steps_per_batch_max=1)

    def live(number: int) -> None:
        name = f"r{number}"
        hand.join(name, rows_max=1 + number)
        hand.submit(f"big {number}", length=3, max_new_tokens=400)
        for index in range(4):
            hand.submit(f"{number} {index}", timeout_s=1e6, tenant=f"t {number}", max_new_tokens=4)
        hand.work(12, name)
        hand.cancel(f"big {number}")
        hand.work(12, name)
        (hand.drain if number % 2 else hand.lose)(name)
        hand.lose(name)
        assert not hand.sequences()

    sizes = []
    for number in range(24):
        live(number)
        sizes.append(kept(hand.scheduler))
    assert max(sizes[12:]) <= max(sizes[4:12])
