"""Proves: open-loop arrivals depend on nothing but their settings, and no wait is left out; shown
with an engine of this process. Time passes in pauses and steps alone."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace

import pytest

from cluster.bench.arrivals import Arrivals, Closed, Extent, Poisson, drive
from cluster.bench.engine import REFUSED_PAUSE_S, over_engine
from cluster.bench.figures import Record, latencies
from cluster.local.engine import LocalEngine
from scheduler.config import SchedulerConfig
from scheduler.messages import Batch, Request
from tests.cluster.fakes import Clock, FakeReplica, perfect

PROMPT = (5, 6, 7)
STEP_S = 0.02


@pytest.fixture(autouse=True)
def _time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turn = Clock(), asyncio.sleep

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    async def pause(seconds: float) -> None:
        sleep(seconds)
        await turn(0)

    time = SimpleNamespace(perf_counter=clock, sleep=sleep)
    for module in ("cluster.bench.arrivals", "tests.cluster.fakes"):
        monkeypatch.setattr(f"{module}.time", time)
    monkeypatch.setattr(asyncio, "sleep", pause)


def ask(number: int) -> Request:
    return Request(str(number), PROMPT, 8)


def every_second_is_refused(number: int) -> Request:
    return Request(str(number), () if number % 2 else PROMPT, 8)


async def driven(
    arrivals: Arrivals, extent: Extent, make: Callable[[int], Request] = ask, rows: int = 1
) -> tuple[list[Record], LocalEngine]:
    config = SchedulerConfig(rows_max=rows, draft_len=0, steps_per_batch_max=1)
    engine = LocalEngine(FakeReplica(STEP_S), config, check=True)
    return await drive(over_engine(engine, make), arrivals, extent), engine


def test_poisson_arrivals_are_a_function_of_the_seed_with_the_wanted_mean() -> None:
    first = list(islice(Poisson(50.0, seed=3).due_s(), 5000))
    assert first == list(islice(Poisson(50.0, seed=3).due_s(), 5000))
    assert first != list(islice(Poisson(50.0, seed=4).due_s(), 5000))
    assert first == sorted(first)
    assert first[-1] == pytest.approx(100.0, rel=0.06)


def test_an_extent_ends_at_the_bound_that_comes_first() -> None:
    both = Extent(requests=3, duration_s=2.0)
    assert [both.ended(2, 1.9), both.ended(3, 0.0), both.ended(0, 2.0)] == [False, True, True]


async def test_open_loop_latency_holds_the_wait_before_sending() -> None:
    """Eight requests all but at once, 8 steps each, one row at a time: the last waits for seven,
    and is sent late, for a batch runs when it is due."""
    records, _ = await driven(Poisson(1e4), Extent(requests=8))
    assert min(latencies(records)) > 7.9 * STEP_S
    assert max(latencies(records)) > 8 * 7.9 * STEP_S
    assert latencies(records) == [(record.end_s or 0.0) - record.due_s for record in records]
    assert records[-1].sent_s - records[-1].due_s > STEP_S / 2


async def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    records, engine = await driven(Closed(2), Extent(requests=7), rows=4)
    for record in records:
        others = [
            entry for entry in records if entry.sent_s <= record.sent_s and entry is not record
        ]
        live = [
            entry for entry in others if entry.end_s is not None and entry.end_s > record.sent_s
        ]
        assert len(live) <= 1
        assert record.due_s == record.sent_s
    assert [record.new_tokens for record in records] == [8] * 7
    assert engine.outputs["6"].tokens == perfect(PROMPT, 8)


async def test_a_duration_ends_the_sending_and_what_runs_is_finished() -> None:
    """A place whose request is refused asks again after a pause."""
    extent = Extent(duration_s=6 * STEP_S)
    records, _ = await driven(Closed(1), extent, every_second_is_refused)
    assert [(record.error, record.new_tokens) for record in records] == [("", 8)]
    records, _ = await driven(Closed(2), extent, every_second_is_refused, rows=2)
    assert records[-1].sent_s < 6 * STEP_S < records[0].end_s
    refused = [record for record in records if record.error == "InvalidRequest"]
    assert 1 <= len(refused) <= 2 * (6 * STEP_S / REFUSED_PAUSE_S + 1)


async def test_what_the_engine_raises_ends_the_load() -> None:
    class Breaks(FakeReplica):
        def step(self, batch: Batch, *_more: object) -> None:  # type: ignore[override]
            raise OSError("broken")

    engine = LocalEngine(Breaks(), SchedulerConfig())
    with pytest.raises(OSError, match="broken"):
        await drive(over_engine(engine, ask), Closed(2), Extent(requests=2))


async def test_a_load_that_is_interrupted_ends_before_its_requests() -> None:
    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    engine = LocalEngine(FakeReplica(STEP_S), SchedulerConfig(draft_len=0, steps_per_batch_max=1))
    load = asyncio.create_task(drive(over_engine(engine, ask), Closed(2), Extent(requests=2)))
    while not (ran := len(engine.results)):
        await asyncio.sleep(0)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0)
    assert 0 < ran <= len(engine.results) <= ran + 2 < 8
    gc.collect()
    assert not said
