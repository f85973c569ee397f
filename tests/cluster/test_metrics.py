"""Proves: every metric in the table is emitted, with its tags, and only those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from grpc import StatusCode

from cluster.metrics import METRICS, FrontendMeter, PoolMeter
from scheduler.messages import Finish, FinishReason, Request as PoolRequest, Submit, Usage
from scheduler.scheduler import Scheduler


def test_the_meters_emit_the_whole_table_sums_once_and_gauges_once_a_second() -> None:
    seen: dict[str, tuple[str, ...]] = {}
    written: Counter[str] = Counter()
    gauges = 0

    def sink(name: str, value: float, tags: Mapping[str, str]) -> None:
        nonlocal gauges
        assert value >= 0
        seen[name] = tuple(tags)
        gauges += name == "lockstep_replicas"
        written[tags.get("reason", name)] += value

    scheduler = Scheduler()
    scheduler.step(Submit(PoolRequest("a", (1,), 1)), 0.0)
    meter = PoolMeter(sink)
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    for tokens, reason in ((3, stop), (4, length), (5, stop)):
        meter.committed(tokens)
        usage = Usage(prompt_tokens=10 * tokens, replicas=("r",), queued_s=0.5)
        meter.finished(Finish("a", reason, usage))
    for now_s in (1.0, 1.5, 1.9, 2.0):
        meter.observe(scheduler, now_s)
    frontend = FrontendMeter(sink)
    frontend.refused(StatusCode.UNAUTHENTICATED)
    for _ in range(2):
        frontend.chunk()
        frontend.chunk()
        frontend.answered("OK", 0.1, 0.2)
    assert seen == {name: metric.tags for name, metric in METRICS.items()}
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
