"""Proves: every metric in the table is counted, with its tags, and only those; what frontends count
is told by the pool, once; the page at /metrics has it by our names and by vLLM's, and
docs/metrics.md lists it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpc import StatusCode
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cluster.metrics import METRICS, CallRecord, FrontendMeter, PoolMeter, Sum
from cluster.metrics.exposition import exposition
from scheduler.messages import (
    Finish,
    FinishReason,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaSpec,
    Request as PoolRequest,
    Submit,
    Usage,
)
from scheduler.scheduler import Scheduler

PAGE = Path("docs/metrics.md")
MADE = "tests.cluster.metrics.test_metrics -->\n"
ANSWERED = CallRecord("a", "", "OK", 1, 3, 8, 5.0, 5.01, 5.1, 5.2, [])
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def scheduler_with_a_request() -> Scheduler:
    scheduler = Scheduler()
    scheduler.step(Submit(PoolRequest("a", (1,), 1)), 0.0)
    return scheduler


def counts_of_a_pool(meter: PoolMeter) -> None:
    for tokens, reason in ((3, STOP), (4, LENGTH), (5, STOP)):
        meter.committed(tokens)
        usage = Usage(
            prompt_tokens=10 * tokens,
            replicas=("r",),
            queued_s=0.5,
            accepted_at=(2, 1),
        )
        meter.finished(Finish("a", reason, usage))


def counts_of_a_frontend(meter: FrontendMeter) -> None:
    meter.refused(StatusCode.UNAUTHENTICATED)
    meter.audited(8, differs=True)
    for _ in range(2):
        meter.chunk()
        meter.chunk()
        meter.tokens(4, 0.02)
        meter.answered(ANSWERED)


def test_the_meters_count_the_whole_table_sums_once_and_gauges_once_a_second() -> None:
    tags_of: dict[str, tuple[str, ...]] = {}
    written: Counter[str] = Counter()
    gauges = 0

    def sink(name: str, value: float, tags: Mapping[str, str]) -> None:
        nonlocal gauges
        assert value >= 0
        gauges += name == "lockstep_replicas"
        tags_of[name] = tuple(tags)
        written[tags.get("reason", name)] += value

    scheduler = scheduler_with_a_request()
    pool = PoolMeter(sink)
    counts_of_a_pool(pool)
    for now_s in (1.0, 1.5, 1.9, 2.0):
        pool.observe(scheduler, now_s)
    counts_of_a_frontend(FrontendMeter(sink))
    assert tags_of == {name: metric.tags for name, metric in METRICS.items()}
    expected = {
        "lockstep_tokens_committed": 12,
        "lockstep_prompt_tokens": 120,
        "lockstep_accepted_tokens_at": 9,
        "lockstep_queue_seconds": 1.5,
        "lockstep_token_seconds": 0.01,
        "lockstep_streamed_chunks": 4,
        STOP.value: 2,
        LENGTH.value: 1,
    }
    assert {name: written[name] for name in expected} == expected
    assert gauges == 2


def test_a_replica_that_goes_is_no_longer_counted() -> None:
    """Though a batch on it still runs."""
    scheduler = Scheduler()
    for name in ("r", "s"):
        scheduler.step(ReplicaJoined(name, ReplicaSpec(10, 4, 64, 100)), 0.0)
    for text in "abcdefgh":
        scheduler.step(Submit(PoolRequest(text, (1,), 4)), 0.0)
    scheduler.step(ReplicaDraining("r"), 0.0)
    assert len(scheduler.snapshot().replicas) == 2
    told = {total.name: total.value for total in PoolMeter().sums(scheduler)}
    assert told["lockstep_replicas"] == 1


def samples(shards: Mapping[int, Sequence[Sum]]) -> dict[str, list[Sample]]:
    """Of the page, by the names of its families."""
    text = exposition(shards, "m").decode()
    families = text_string_to_metric_families(text)
    return {family.name: family.samples for family in families}


def test_the_page_has_the_whole_table_by_both_names() -> None:
    pool, frontend = PoolMeter(), FrontendMeter()
    counts_of_a_pool(pool)
    counts_of_a_frontend(frontend)
    pool.told(frontend.take())
    found = samples({0: pool.sums(scheduler_with_a_request())})
    for name, metric in METRICS.items():
        for key in (name, *(f"vllm:{other}" for other in metric.vllm)):
            labels = set().union(*(sample.labels for sample in found.pop(key)))
            tags = metric.tags if key == name else metric.vllm_tags or metric.tags
            bounds = {"le"} if metric.kind == "Histogram" else set()
            place = {"shard"} if key == name else {"model_name", "engine"}
            assert labels == {*tags, *bounds, *place}, key
    assert not found


def test_counts_of_frontends_come_once_and_add_up() -> None:
    pool, frontends = PoolMeter(), [FrontendMeter(), FrontendMeter()]
    for _ in range(3):
        for frontend in frontends:
            counts_of_a_frontend(frontend)
            pool.told(frontend.take())
            pool.told(frontend.take())
    scheduler = Scheduler()
    first, second = pool.sums(scheduler), pool.sums(scheduler)
    assert first == second
    found = samples({0: first, 1: first})
    totals = {
        sample.name + sample.labels.get("le", ""): sample.value
        for sample in found["vllm:time_to_first_token_seconds"]
        if sample.labels["engine"] == "1"
    }
    assert totals["vllm:time_to_first_token_seconds_count"] == 12
    assert abs(totals["vllm:time_to_first_token_seconds_sum"] - 1.2) < 1e-9
    # A value on a bound counts below it.
    assert totals["vllm:time_to_first_token_seconds_bucket0.05"] == 0
    assert totals["vllm:time_to_first_token_seconds_bucket0.1"] == 12
    assert totals["vllm:time_to_first_token_seconds_bucket+Inf"] == 12
    refused = found["lockstep_calls_refused"]
    assert {(s.labels["shard"], s.value) for s in refused if s.name.endswith("_total")} == {
        ("0", 6),
        ("1", 6),
    }


def table() -> str:
    """Of the page in docs."""
    lines = ["| metric | kind | labels | what | in vLLM |", "|---|---|---|---|---|"]
    for name, metric in METRICS.items():
        theirs = "<br>".join(f"`vllm:{other}`" for other in metric.vllm)
        labels = ", ".join(metric.tags)
        counter = "_total" if metric.kind == "Counter" else ""
        kind = metric.kind.lower()
        lines.append(f"| `{name}{counter}` | {kind} | {labels} | {metric.help} | {theirs} |")
    return "\n".join(lines) + "\n"


def test_the_page_in_docs_lists_the_table() -> None:
    assert PAGE.read_text().partition(MADE)[2] == table()


if __name__ == "__main__":
    PAGE.write_text("".join(PAGE.read_text().partition(MADE)[:2]) + table())
