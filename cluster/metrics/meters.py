"""Who counts: the pool and each frontend.

A meter without a `sink` writes nothing elsewhere, so that everything else runs without Ray. What it
has counted it keeps as sums, for `/metrics`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cluster.metrics.calls import CallRecord
from cluster.metrics.sums import Sink, Sum, Sums
from cluster.metrics.table import METRICS
from scheduler.messages import Finish

if TYPE_CHECKING:
    from grpc import StatusCode

    from scheduler.scheduler import Scheduler
    from scheduler.status import PoolStatus


_EVERY_S = 1.0
"""Between two observations of the pool."""
_NO_TAGS: Mapping[str, str] = {}


def _nowhere(_name: str, _value: float, _tags: Mapping[str, str]) -> None:
    pass


class _Meter:
    """What is counted goes to the sink, and into sums."""

    def __init__(self, sink: Sink = _nowhere) -> None:
        self._sink = sink
        self._sums = Sums()

    def _count(self, name: str, value: float, tags: Mapping[str, str] = _NO_TAGS) -> None:
        self._sink(name, value, tags)
        self._sums.add(name, value, tags)


class PoolMeter(_Meter):
    """What the pool counts. Adds up between two observations, so that a step costs an addition."""

    def __init__(self, sink: Sink = _nowhere) -> None:
        super().__init__(sink)
        self._next_s = 0.0
        self._since: Counter[tuple[str, str]] = Counter()
        """By a counter and its tag, since the last observation."""
        self._preempted = self._moved = 0
        """Sums at the last observation."""

    def committed(self, tokens: int) -> None:
        self._since["lockstep_tokens_committed", ""] += tokens

    def finished(self, finish: Finish) -> None:
        usage, since = finish.usage, self._since
        if usage.replicas:
            self._count("lockstep_queue_seconds", usage.queued_s)
        self._count("lockstep_request_prompt_tokens", usage.prompt_tokens)
        self._count("lockstep_request_new_tokens", usage.completion_tokens)
        since["lockstep_requests_finished", finish.reason.value] += 1
        since["lockstep_requests_recovered", ""] += usage.recovered
        since["lockstep_prompt_tokens", ""] += usage.prompt_tokens
        since["lockstep_cached_tokens", ""] += usage.cached_tokens
        since["lockstep_drafts", ""] += usage.drafts
        since["lockstep_draft_tokens", ""] += usage.draft_tokens
        since["lockstep_accepted_tokens", ""] += usage.accepted_tokens
        for position, accepted in enumerate(usage.accepted_at):
            since["lockstep_accepted_tokens_at", str(position)] += accepted

    def told(self, sums: Iterable[Sum]) -> None:
        """What a frontend has counted, and has written to its own sink."""
        self._sums.merge(sums)

    def observe(self, scheduler: Scheduler, now_s: float) -> None:
        """Write what has added up and the gauges, at most once a second."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        status = scheduler.snapshot()
        self._settle(status)
        for name, value in gauges(status).items():
            self._sink(name, value, _NO_TAGS)

    def sums(self, scheduler: Scheduler) -> list[Sum]:
        """All that was counted since this pool's start, and the gauges as they are."""
        status = scheduler.snapshot()
        self._settle(status)
        return [
            *self._sums.all(),
            *(Sum(name, (), value) for name, value in gauges(status).items()),
        ]

    def _settle(self, status: PoolStatus) -> None:
        since, self._since = self._since, Counter()
        for (name, tag), total in since.items():
            tags = METRICS[name].tags
            self._count(name, total, {tags[0]: tag} if tags else _NO_TAGS)
        self._count("lockstep_sequences_preempted", status.preempted - self._preempted)
        self._count("lockstep_sequences_moved", status.moved - self._moved)
        self._preempted, self._moved = status.preempted, status.moved


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
        "lockstep_kv_usage": used / blocks if blocks else 0.0,
        "lockstep_acceptance": figures.acceptance,
        "lockstep_batch_spread": figures.spread_mean,
    }


class FrontendMeter(_Meter):
    """What a frontend counts; times in seconds. Its sums go to a pool with the next beat."""

    def __init__(self, sink: Sink = _nowhere) -> None:
        super().__init__(sink)
        self._chunks = 0
        """Not written yet: to write costs more than to count."""

    def chunk(self) -> None:
        self._chunks += 1

    def tokens(self, number: int, after_s: float) -> None:
        """A token update of a request, so long after the one before."""
        self._count("lockstep_token_seconds", after_s / number)

    def refused(self, code: StatusCode) -> None:
        self._count("lockstep_calls_refused", 1, {"status": code.name})

    def answered(self, call: CallRecord) -> None:
        if self._chunks:
            chunks, self._chunks = self._chunks, 0
            self._count("lockstep_streamed_chunks", chunks)
        if call.first_token_s:
            self._count("lockstep_first_token_seconds", call.to_first_token_s)
        self._count("lockstep_request_seconds", call.total_s, {"status": call.status})

    def audited(self, tokens: int, differs: bool) -> None:
        """A finished request was decoded again, and so many of its tokens were compared."""
        self._count("lockstep_audited_requests", 1)
        self._count("lockstep_audited_tokens", tokens)
        self._count("lockstep_audit_mismatches", differs)

    def take(self) -> list[Sum]:
        """What was counted since the last time."""
        return self._sums.take()
