"""Proves: every metric in the table is emitted, with its tags, and only those."""

from __future__ import annotations

from collections.abc import Mapping

from grpc import StatusCode

from cluster.metrics import METRICS, IngressMeter, PoolMeter
from scheduler.messages import Finish, FinishReason, Reject, RejectCode, Submit
from scheduler.messages import Request as PoolRequest
from scheduler.scheduler import Scheduler


def test_the_meters_emit_the_whole_table() -> None:
    seen: dict[str, Mapping[str, str]] = {}

    def sink(name: str, value: float, tags: Mapping[str, str]) -> None:
        assert value >= 0
        seen[name] = tags

    scheduler = Scheduler()
    scheduler.step(Submit(PoolRequest("a", (1,), 1)), 0.0)
    pool = PoolMeter(sink)
    pool.committed(3)
    pool.finished(Finish("a", FinishReason.STOP))
    pool.rejected(Reject("a", RejectCode.INVALID, "prompt", "no"))
    pool.observe(scheduler, 1.0)
    ingress = IngressMeter(sink)
    ingress.chunk()
    ingress.refused(StatusCode.UNAUTHENTICATED)
    ingress.answered("STOP", 0.1, 0.2)
    assert {name: tuple(tags) for name, tags in seen.items()} == {
        name: metric.tags for name, metric in METRICS.items()
    }


def test_gauges_are_written_at_most_once_a_second() -> None:
    names: list[str] = []
    meter = PoolMeter(lambda name, _value, _tags: names.append(name))
    for now_s in (1.0, 1.5, 1.9, 2.0):
        meter.observe(Scheduler(), now_s)
    assert names.count("lockstep_replicas") == 2


def test_a_meter_without_a_sink_does_nothing() -> None:
    PoolMeter().observe(Scheduler(), 1.0)
