"""Proves: open-loop arrivals depend on nothing but their settings, and no wait is left out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest

from cluster.bench.arrivals import Arrivals, Closed, Extent, Poisson
from cluster.bench.engine import REFUSED_PAUSE_S, drive
from cluster.bench.figures import Record, latencies
from cluster.local_engine import LocalEngine
from scheduler.config import SchedulerConfig
from scheduler.messages import Batch, Request, StepResult
from tests.cluster import fakes
from tests.cluster.fakes import FakeReplica, perfect

PROMPT = (5, 6, 7)


class Clock(fakes.Clock):
    """Time passes in steps and sleeps only."""

    def __init__(self) -> None:
        super().__init__(100.0)

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += max(seconds, 1e-9)  # as a sleep does, it takes some time


class TimedReplica(FakeReplica):
    """Every step takes `step_s` of the given clock; a prefill takes none."""

    def __init__(self, clock: Clock, step_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._takes_s = step_s

    def step(self, batch: Batch, *args: object) -> StepResult:  # type: ignore[override]
        result = super().step(batch)
        self._clock.now_s += self._takes_s * result.steps
        return result


def ask(number: int) -> Request:
    return Request(str(number), PROMPT, 8)


def engine_of(clock: Clock, step_s: float, rows: int = 1) -> LocalEngine:
    config = SchedulerConfig(rows_max=rows, draft_len=0, steps_per_batch_max=1)
    return LocalEngine(TimedReplica(clock, step_s), config, clock, check=True)


def refused(number: int) -> Request:
    return Request(str(number), (), 8)


def driven(
    clock: Clock,
    arrivals: Arrivals,
    extent: Extent,
    make: Callable[[int], Request] = ask,
    step_s: float = 1.0,
    rows: int = 1,
) -> list[Record]:
    engine = engine_of(clock, step_s, rows)
    return drive(engine, make, arrivals, extent, clock=clock, sleep=clock.sleep)


def test_poisson_arrivals_are_a_function_of_the_seed_with_the_wanted_mean() -> None:
    first = list(islice(Poisson(50.0, seed=3).due_s(), 5000))
    assert first == list(islice(Poisson(50.0, seed=3).due_s(), 5000))
    assert first != list(islice(Poisson(50.0, seed=4).due_s(), 5000))
    assert first == sorted(first)
    assert first[-1] == pytest.approx(100.0, rel=0.06)


def test_an_extent_ends_at_the_bound_that_comes_first() -> None:
    both = Extent(requests=3, duration_s=2.0)
    assert [both.ended(2, 1.9), both.ended(3, 0.0), both.ended(0, 2.0)] == [False, True, True]
    with pytest.raises(ValueError, match="requests, duration_s"):
        Extent()


def test_open_loop_latency_holds_the_wait_before_sending() -> None:
    """Ten requests all but at once, 8 steps of 1 s each, one row at a time: the last waits for
    nine."""
    records = driven(Clock(), Poisson(1e6), Extent(requests=10))
    assert min(latencies(records)) >= 8.0
    assert max(latencies(records)) == pytest.approx(80.0, abs=0.01)


def test_a_request_due_while_a_batch_runs_is_sent_late_and_says_so() -> None:
    first, *others = records = driven(Clock(), Poisson(1.0), Extent(requests=4), step_s=10.0)
    assert first.sent_s == pytest.approx(first.due_s)
    assert all(one.due_s < one.sent_s == pytest.approx(first.sent_s + 10.0) for one in others)
    assert latencies(records) == [(one.end_s or 0.0) - one.due_s for one in records]


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    clock = Clock()
    engine = engine_of(clock, 1.0, rows=4)
    records = drive(engine, ask, Closed(2), Extent(requests=7), clock=clock, sleep=clock.sleep)
    for record in records:
        others = [one for one in records if one.sent_s <= record.sent_s and one is not record]
        live = [one for one in others if one.end_s is not None and one.end_s > record.sent_s]
        assert len(live) <= 1
        assert record.due_s == record.sent_s
    assert [record.new_tokens for record in records] == [8] * 7
    assert engine.outputs["6"].tokens == perfect(PROMPT, 8)


def test_a_duration_ends_the_sending_and_what_runs_is_finished() -> None:
    records = driven(Clock(), Closed(1), Extent(duration_s=20.0))
    assert [record.end_s for record in records] == [8.0, 16.0, 24.0]


def test_a_load_of_which_all_is_refused_ends_with_its_duration() -> None:
    clock = Clock()
    records = driven(clock, Closed(3), Extent(duration_s=2.0), refused)
    assert clock.now_s >= 102.0
    assert {record.error for record in records} == {"InvalidRequest"}
    assert len(records) <= 3 * (2.0 / REFUSED_PAUSE_S + 1)


def test_a_place_whose_request_is_refused_asks_again_after_the_next_batch() -> None:
    def make(number: int) -> Request:
        return Request(str(number), () if number % 2 else PROMPT, 8)

    records = driven(Clock(), Closed(2), Extent(requests=8), make, rows=2)
    assert [record.error for record in records] == ["", "InvalidRequest"] * 4
    assert records[0].end_s == 8.0
    assert records[2].sent_s < records[0].end_s
