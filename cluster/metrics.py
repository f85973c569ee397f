"""The metrics that Lockstep emits. One table of names; dashboards are checked against it.

A meter without a `sink` counts nothing, so that everything else runs without Ray.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from scheduler.messages import Finish

if TYPE_CHECKING:
    from grpc import StatusCode

    from scheduler.scheduler import Scheduler
    from scheduler.status import PoolStatus


_EVERY_S = 1.0
"""Between two observations of the pool."""
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metric(NamedTuple):
    """One metric; Ray exports it as `ray_<name>`, a counter as `ray_<name>_total`."""

    kind: str
    """Name of the class in `ray.util.metrics`."""
    help: str
    tags: tuple[str, ...] = ()


METRICS: Mapping[str, Metric] = {
    "lockstep_tokens_committed": Metric("Counter", "Tokens committed by the pool."),
    "lockstep_requests_finished": Metric("Counter", "Requests finished, by reason.", ("reason",)),
    "lockstep_prompt_tokens": Metric("Counter", "Prompt tokens of finished requests."),
    "lockstep_cached_tokens": Metric(
        "Counter", "Those of them that an earlier request with the same prefix had computed."
    ),
    "lockstep_requests_recovered": Metric(
        "Counter", "Times that a request lost its place on a replica and was prefilled again."
    ),
    "lockstep_sequences_preempted": Metric(
        "Counter", "Sequences sent back to waiting because KV blocks ran out."
    ),
    "lockstep_sequences_moved": Metric(
        "Counter", "Sequences moved to a replica with fewer of them."
    ),
    "lockstep_draft_tokens": Metric("Counter", "Draft tokens of finished requests."),
    "lockstep_accepted_tokens": Metric("Counter", "Accepted tokens of finished requests."),
    "lockstep_waiting_requests": Metric("Gauge", "Requests that wait for a replica."),
    "lockstep_waiting_tokens": Metric(
        "Gauge", "Tokens, prompt and limit, of the requests that wait."
    ),
    "lockstep_outstanding_tokens": Metric(
        "Gauge", "Tokens that accepted requests are still expected to commit."
    ),
    "lockstep_running_requests": Metric("Gauge", "Requests that are on a replica."),
    "lockstep_replicas": Metric("Gauge", "Replicas that take requests; one that drains is none."),
    "lockstep_kv_blocks": Metric("Gauge", "KV blocks of all replicas."),
    "lockstep_kv_blocks_free": Metric("Gauge", "Free KV blocks of all replicas."),
    "lockstep_acceptance": Metric(
        "Gauge", "Accepted over draft tokens, of the replicas that are there now."
    ),
    "lockstep_batch_spread": Metric(
        "Gauge", "Longest minus shortest row of a batch, mean over the replicas that are there now."
    ),
    "lockstep_queue_seconds": Metric("Histogram", "From a pool's acceptance to the first replica."),
    "lockstep_first_token_seconds": Metric(
        "Histogram", "From a request's arrival to its first token."
    ),
    "lockstep_request_seconds": Metric(
        "Histogram", "From a request's arrival to its end, by status code.", ("status",)
    ),
    "lockstep_calls_refused": Metric(
        "Counter", "Calls refused by a frontend or the pool, by status code.", ("status",)
    ),
    "lockstep_streamed_chunks": Metric("Counter", "Chunks sent to streaming clients."),
}

Sink = Callable[[str, float, Mapping[str, str]], None]
"""Takes (name, value, tags): adds to a counter, sets a gauge, observes in a histogram."""


def _nowhere(_name: str, _value: float, _tags: Mapping[str, str]) -> None:
    pass


def ray_sink() -> Sink:
    """A sink to Ray's metrics; call it in the process that will use it."""
    from ray.util import metrics as ray_metrics

    write = {"Counter": "inc", "Gauge": "set", "Histogram": "observe"}

    @functools.cache
    def writer(name: str) -> Callable[..., None]:
        kind, help_, tags = METRICS[name]
        options = {"boundaries": list(_SECONDS)} if kind == "Histogram" else {}
        metric = getattr(ray_metrics, kind)(name, help_, tag_keys=tags, **options)
        return getattr(metric, write[kind])  # type: ignore[no-any-return]

    def sink(name: str, value: float, tags: Mapping[str, str]) -> None:
        # Ray's counters take nothing that is not above 0.
        if value > 0 or METRICS[name].kind != "Counter":
            writer(name)(value, tags=dict(tags))

    return sink


class PoolMeter:
    """What the pool counts. Sums between two observations, so that a step costs an addition."""

    def __init__(self, sink: Sink = _nowhere) -> None:
        self._sink = sink
        self._next_s = 0.0
        self._sums: Counter[tuple[str, str]] = Counter()
        """By a counter and the reason that is its tag, since the last observation."""
        self._preempted = self._moved = 0
        """Sums at the last observation."""

    def committed(self, tokens: int) -> None:
        self._sums["lockstep_tokens_committed", ""] += tokens

    def finished(self, finish: Finish) -> None:
        usage, sums = finish.usage, self._sums
        if usage.replicas:
            self._sink("lockstep_queue_seconds", usage.queued_s, {})
        sums["lockstep_requests_finished", finish.reason.value] += 1
        sums["lockstep_requests_recovered", ""] += usage.recovered
        sums["lockstep_prompt_tokens", ""] += usage.prompt_tokens
        sums["lockstep_cached_tokens", ""] += usage.cached_tokens
        sums["lockstep_draft_tokens", ""] += usage.draft_tokens
        sums["lockstep_accepted_tokens", ""] += usage.accepted_tokens

    def observe(self, scheduler: Scheduler, now_s: float) -> None:
        """Write the sums and the gauges, at most once a second."""
        if now_s < self._next_s or self._sink is _nowhere:
            return
        self._next_s = now_s + _EVERY_S
        sums, self._sums = self._sums, Counter()
        for (name, reason), total in sums.items():
            self._sink(name, total, {"reason": reason} if reason else {})
        status = scheduler.snapshot()
        self._sink("lockstep_sequences_preempted", status.preempted - self._preempted, {})
        self._sink("lockstep_sequences_moved", status.moved - self._moved, {})
        self._preempted, self._moved = status.preempted, status.moved
        for name, value in gauges(status).items():
            self._sink(name, value, {})


def gauges(status: PoolStatus) -> dict[str, float]:
    """The gauges that a snapshot of the scheduler gives."""
    blocks = sum(replica.spec.kv_blocks for replica in status.replicas)
    used = sum(replica.kv_blocks_used for replica in status.replicas)
    figures = status.figures
    return {
        "lockstep_waiting_requests": status.waiting,
        "lockstep_waiting_tokens": status.waiting_tokens,
        "lockstep_outstanding_tokens": status.outstanding_tokens,
        "lockstep_running_requests": status.live - status.waiting,
        "lockstep_replicas": status.serving,
        "lockstep_kv_blocks": blocks,
        "lockstep_kv_blocks_free": blocks - used,
        "lockstep_acceptance": figures.acceptance,
        "lockstep_batch_spread": figures.spread_mean,
    }


class FrontendMeter:
    """What a frontend counts; times in seconds."""

    def __init__(self, sink: Sink = _nowhere) -> None:
        self._sink = sink
        self._chunks = 0
        """Not written yet: to write costs more than to count."""

    def chunk(self) -> None:
        self._chunks += 1

    def refused(self, code: StatusCode) -> None:
        self._sink("lockstep_calls_refused", 1, {"status": code.name})

    def answered(self, status: str, first_token_s: float, total_s: float) -> None:
        if self._chunks:
            chunks, self._chunks = self._chunks, 0
            self._sink("lockstep_streamed_chunks", chunks, {})
        if first_token_s > 0:
            self._sink("lockstep_first_token_seconds", first_token_s, {})
        self._sink("lockstep_request_seconds", total_s, {"status": status})
