"""Proves: every metric in the table is emitted, with its tags, and only those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from grpc import StatusCode

from cluster.metrics import METRICS, FrontendMeter, PoolMeter
from scheduler.messages import Finish, FinishReason, Request as PoolRequest, Submit, Usage
from scheduler.scheduler import Scheduler


def test_the_meters_emit_the_whole_table_sums_once_and_gauges_once_a_second() -> None:
    tags_of: dict[str, tuple[str, ...]] = {}
    written: Counter[str] = Counter()
    gauges = 0

    def sink(name: str, value: float, tags: Mapping[str, str]) -> None:
        nonlocal gauges
        assert value >= 0
        gauges += name == "lockstep_replicas"
        tags_of[name] = tuple(tags)
        written[tags.get("reason", name)] += value

    scheduler = Scheduler()
    scheduler.step(Submit(PoolRequest("a", (1,), 1)), 0.0)
    pool = PoolMeter(sink)
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    for tokens, reason in ((3, stop), (4, length), (5, stop)):
        pool.committed(tokens)
        usage = Usage(prompt_tokens=10 * tokens, replicas=("r",), queued_s=0.5)
        pool.finished(Finish("a", reason, usage))
    for now_s in (1.0, 1.5, 1.9, 2.0):
        pool.observe(scheduler, now_s)
    meter = FrontendMeter(sink)
    meter.refused(StatusCode.UNAUTHENTICATED)
    for _ in range(2):
        meter.chunk()
        meter.chunk()
        meter.answered("OK", 0.1, 0.2)
    assert tags_of == {name: metric.tags for name, metric in METRICS.items()}
    expected = {
        "lockstep_tokens_committed": 12,
        "lockstep_prompt_tokens": 120,
        "lockstep_queue_seconds": 1.5,
        "lockstep_streamed_chunks": 4,
        stop.value: 2,
        length.value: 1,
    }
    assert {name: written[name] for name in expected} == expected
    assert gauges == 2
