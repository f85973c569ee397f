"""Proves: every metric in the table is emitted, with its tags, and only those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from grpc import StatusCode

from cluster.metrics import METRICS, FrontendMeter, PoolMeter
from scheduler.messages import (
    Finish,
    FinishReason,
    Reject,
    RejectCode,
    Request as PoolRequest,
    Submit,
    Usage,
)
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
    pool.finished(Finish("a", FinishReason.STOP, Usage(replicas=("r",))))
    pool.rejected(Reject("a", RejectCode.INVALID, "prompt", "no"))
    pool.observe(scheduler, 1.0)
    meter = FrontendMeter(sink)
    meter.chunk()
    meter.refused(StatusCode.UNAUTHENTICATED)
    meter.answered("OK", 0.1, 0.2)
    assert {name: tuple(tags) for name, tags in seen.items()} == {
        name: metric.tags for name, metric in METRICS.items()
    }


def test_sums_are_written_once() -> None:
    written: Counter[str] = Counter()
    reasons: Counter[str] = Counter()

    def sink(name: str, value: float, tags: Mapping[str, str]) -> None:
        written[name] += value
        if "reason" in tags:
            reasons[tags["reason"]] += value

    meter = PoolMeter(sink)
    for tokens, reason in (
        (3, FinishReason.STOP),
        (4, FinishReason.LENGTH),
        (5, FinishReason.STOP),
    ):
        meter.committed(tokens)
        usage = Usage(prompt_tokens=10 * tokens, replicas=("r",), queued_s=0.5)
        meter.finished(Finish("a", reason, usage))
    for now_s in (1.0, 3.0):
        meter.observe(Scheduler(), now_s)
    assert written["lockstep_tokens_committed"] == 12
    assert written["lockstep_prompt_tokens"] == 120
    assert written["lockstep_queue_seconds"] == 1.5
    assert reasons == {FinishReason.STOP.value: 2, FinishReason.LENGTH.value: 1}
    meter = FrontendMeter(sink)
    for _ in range(2):
        meter.chunk()
        meter.chunk()
        meter.answered("OK", 0.1, 0.2)
    assert written["lockstep_streamed_chunks"] == 4


def test_gauges_are_written_at_most_once_a_second() -> None:
    names: list[str] = []
    meter = PoolMeter(lambda name, _value, _tags: names.append(name))
    for now_s in (1.0, 1.5, 1.9, 2.0):
        meter.observe(Scheduler(), now_s)
    assert names.count("lockstep_replicas") == 2
