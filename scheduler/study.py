"""A load on many replicas in virtual time: the real scheduler, timed replicas, and what came of it.

Shards are worlds on one clock; each request goes to the one that `choose_shard` says, as in a
cluster. Latencies are those at the pool: from a request's arrival at an ingress, with the way to
the pool, to the news of it; tokenizing and the way to the client are not in them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from pydantic import BaseModel, ConfigDict, Field

from scheduler.arrivals import Ask
from scheduler.config import SchedulerConfig
from scheduler.messages import Event, ReplicaSpec, Request, StepDone
from scheduler.sharding import ShardLoad, choose_shard, shard_of_rank
from scheduler.simulator import Outcome, Trouble, World
from scheduler.timed_replica import TOKEN, TimedReplica, Times
from scheduler.virtual_clock import VirtualClock

SAMPLES_MAX = 100
"""Looks at the pool over time, beside the last one; when there are more, every second one is
dropped."""
FIRST_SAMPLE_S = 0.05


class PoolTimes(BaseModel):
    """CPU time for which events occupy a pool actor, its messages included. Seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_s: float = Field(ge=0, description="A replica's result and the next batch.")
    batch_row_s: float = Field(default=0, ge=0, description="The same per row.")
    other_s: float = Field(ge=0, description="Any other event: a request that comes or goes.")

    def of(self, event: Event) -> float:
        """Seconds for one event."""
        if isinstance(event, StepDone):
            return self.batch_s + self.batch_row_s * len(event.result.rows)
        return self.other_s


MEASURED_POOL = PoolTimes(batch_s=0.6e-3, other_s=0.0)
"""All CPU time of a pool's process over the batches that it gave out, requests included, as
`benchmarks.cluster` measures it on two cores with 64 requests in flight: 0.50 to 0.61 ms with 4
replicas, 0.39 to 0.45 with 16, 0.95 to 1.03 with one; a pool that is never idle takes 0.25. So near
the limit of a pool this is pessimistic."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Replicas, pools and how they work."""

    replicas: int
    spec: ReplicaSpec
    times: Times
    config: SchedulerConfig
    shards: int = 1
    pool: PoolTimes | None = None
    """None: a pool takes no time."""
    in_flight: int | None = None
    """A closed loop of so many requests; None: each comes when its time has come."""
    message_s: tuple[float, float] = (0.0005, 0.0015)
    """Least and most time of a message between a pool and others."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The pools at one moment, all shards together."""

    at_s: float
    waiting: int
    live: int
    committed_tokens: int
    busy_s: float
    pool_busy_s: float
    pool_behind_s: float
    """How long an event that comes now waits for its pool, at the worst of them."""


@dataclass(slots=True)
class Figures:
    """What came of a study. Times are virtual seconds, one entry per finished request."""

    samples: list[Sample] = field(default_factory=list)
    """The first when the first request comes, the last when the last one ends."""
    middle: list[Sample] = field(default_factory=list)
    """When a quarter of the requests had ended, and three quarters."""
    latency_s: array[float] = field(default_factory=lambda: array("d"))
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    per_token_s: array[float] = field(default_factory=lambda: array("d"))
    """From the first news to the last, over the tokens after the first news; of requests of two or
    more news."""
    asked: int = 0
    refused: int = 0
    refusal: str = ""
    """Why the first of them was refused."""
    tokens: int = 0
    waiting_most: int = 0
    """The most that waited at a time, in all shards together; `samples` miss such moments."""
    pool_behind_s_most: float = 0.0
    """The longest that an event would have waited for its pool, likewise."""
    began_s: float = 0.0
    """When the first request came."""
    ended_s: float = 0.0
    """When the last one ended."""
    events: int = 0
    batches: int = 0
    rows_mean: float = 0.0
    spread_mean: float = 0.0
    padding: float = 0.0
    """Share of the KV positions read that lie beyond a row's own."""
    committed_per_step: float = 0.0
    """Tokens per row and step."""
    recovered: int = 0

    @property
    def finished(self) -> int:
        return len(self.latency_s)

    def tokens_per_s(self) -> float:
        """Over the middle half of the requests, or over all where there is no such time."""
        first, last = self._span()
        return _over(last.committed_tokens - first.committed_tokens, last.at_s - first.at_s)

    def utilisation(self, replicas: int) -> float:
        """Share of the replicas' time in which they ran batches, over the same span."""
        first, last = self._span()
        return _over(last.busy_s - first.busy_s, (last.at_s - first.at_s) * replicas)

    def pool_utilisation(self, shards: int) -> float:
        """Share of the pools' time in which they were occupied, over the same span."""
        first, last = self._span()
        return _over(last.pool_busy_s - first.pool_busy_s, (last.at_s - first.at_s) * shards)

    def _span(self) -> tuple[Sample, Sample]:
        if len(self.middle) == 2 and self.middle[0].at_s < self.middle[1].at_s:
            return self.middle[0], self.middle[1]
        return self.samples[0], self.samples[-1]


@dataclass(frozen=True, slots=True)
class _Open:
    """A request that has not ended."""

    ask: Ask
    arrived_s: float
    shard: int


class Study:
    """One run: `Study(setup, asks, count, rng).run()`."""

    def __init__(self, setup: Setup, asks: Iterable[Ask], count: int, rng: Random) -> None:
        """`asks` rise by time and are `count`; `rng` draws messages and accepted tokens."""
        assert count >= 1, "a study without requests"
        assert setup.replicas >= setup.shards >= 1, "every shard needs a replica"
        self._setup = setup
        self._asks = iter(asks)
        self._count = count
        self._clock = VirtualClock()
        self._figures = Figures()
        self._rng = rng
        self._open: dict[str, _Open] = {}
        self._outstanding = [0] * setup.shards
        """New tokens of the requests that were sent to a shard and have not ended."""
        self._serving = [0] * setup.shards
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._sample_s = FIRST_SAMPLE_S
        self._waiting = [0] * setup.shards
        self._waiting_all = 0
        self._ended = 0
        self._worlds = [self._world(shard) for shard in range(setup.shards)]
        for rank in range(setup.replicas):
            shard = shard_of_rank(rank, setup.shards)
            self._serving[shard] += 1
            self._worlds[shard].join(0.0, f"r{rank}", setup.spec)

    def run(self) -> Figures:
        """Until every request has ended."""
        for _ in range(self._setup.in_flight or 1):
            self._plan_next()
        self._clock.run()
        figures = self._figures
        assert self._ended == figures.asked == self._count, "requests were lost"
        reports = [world.end() for world in self._worlds]
        statuses = [world.scheduler.snapshot() for world in self._worlds]
        replicas = [one for status in statuses for one in status.replicas]
        groups = sum(report.group_batches for report in reports)
        figures.pool_behind_s_most = max(report.pool_behind_s_most for report in reports)
        figures.events = sum(report.events for report in reports)
        figures.batches = sum(report.batches for report in reports)
        figures.rows_mean = _over(sum(report.rows_sum for report in reports), groups)
        figures.spread_mean = _over(sum(report.spread_sum for report in reports), groups)
        own = sum(one.kv_positions_own for one in replicas)
        read = sum(one.kv_positions_read for one in replicas)
        figures.padding = 1 - _over(own, read) if read else 0.0
        row_steps = sum(one.row_steps for one in replicas)
        figures.committed_per_step = _over(sum(one.committed_tokens for one in replicas), row_steps)
        figures.recovered = sum(status.recovered for status in statuses)
        return figures

    # ----------------------------------------------------------------- requests

    def _plan_next(self) -> None:
        ask = next(self._asks, None)
        if ask is not None:
            self._clock.at(ask.at_s, lambda: self._arrive(ask))

    def _arrive(self, ask: Ask) -> None:
        figures, now_s = self._figures, self._clock.now_s
        if not figures.asked:
            figures.began_s = now_s
            self._look_again()
        name = f"q{figures.asked}"
        figures.asked += 1
        if self._setup.in_flight is None:
            self._plan_next()
        loads = [
            ShardLoad(serving, outstanding)
            for serving, outstanding in zip(self._serving, self._outstanding, strict=True)
        ]
        shard = choose_shard(loads, ask.new_tokens)
        self._outstanding[shard] += ask.new_tokens
        self._open[name] = _Open(ask, now_s, shard)
        prompt = self._prompts.get(ask.prompt_tokens)
        if prompt is None:
            prompt = self._prompts[ask.prompt_tokens] = (TOKEN,) * ask.prompt_tokens
        request = Request(name, prompt, max_new_tokens=ask.new_tokens)
        self._worlds[shard].submit(now_s + self._rng.uniform(*self._setup.message_s), request)

    def _note_end(self, name: str, outcome: Outcome) -> None:
        figures = self._figures
        one = self._open.pop(name)
        del self._worlds[one.shard].report.outcomes[name]
        self._outstanding[one.shard] -= one.ask.new_tokens
        self._ended += 1
        if self._ended in (self._count // 4, 3 * self._count // 4):
            figures.middle.append(self._sample())
        if self._ended == self._count:
            figures.ended_s = self._clock.now_s
            figures.samples.append(self._sample())
        if self._setup.in_flight is not None:
            self._plan_next()
        if outcome.finish is None or outcome.first_token_s is None:
            reject = outcome.reject
            assert reject is not None, "a request failed"
            if not figures.refused:
                figures.refusal = ": ".join(filter(None, (reject.field, reject.message)))
            figures.refused += 1
            return
        assert outcome.finished_s is not None
        tokens = len(outcome.tokens)
        figures.tokens += tokens
        figures.latency_s.append(outcome.finished_s - one.arrived_s)
        figures.first_token_s.append(outcome.first_token_s - one.arrived_s)
        # `lockstep bench` counts so, too: what comes at once took no time of its own.
        later = tokens - outcome.first_tokens
        if later:
            figures.per_token_s.append((outcome.finished_s - outcome.first_token_s) / later)

    # ----------------------------------------------------------------- worlds

    def _world(self, shard: int) -> World:
        setup, rng = self._setup, self._rng

        def replica(replica_id: str, spec: ReplicaSpec) -> TimedReplica:
            return TimedReplica(
                replica_id, spec, setup.times, lambda name: self._open[name].ask.acceptance, rng
            )

        return World(
            rng,
            setup.config,
            step_time=lambda batch: setup.times(batch).total_s,
            trouble=Trouble(delay_s=setup.message_s),
            watch=lambda now_s, event, actions: self._note_waiting(shard),
            clock=self._clock,
            pool_cost=setup.pool.of if setup.pool is not None else None,
            replica=replica,
            ended=self._note_end,
        )

    def _note_waiting(self, shard: int) -> None:
        waiting = self._worlds[shard].waiting
        self._waiting_all += waiting - self._waiting[shard]
        self._waiting[shard] = waiting
        if self._waiting_all > self._figures.waiting_most:
            self._figures.waiting_most = self._waiting_all

    def _look_again(self) -> None:
        if self._ended == self._count:
            return
        figures = self._figures
        figures.samples.append(self._sample())
        if len(figures.samples) > SAMPLES_MAX:
            del figures.samples[1::2]
            self._sample_s *= 2
        self._clock.at(self._clock.now_s + self._sample_s, self._look_again)

    def _sample(self) -> Sample:
        statuses = [world.scheduler.snapshot() for world in self._worlds]
        replicas = [one for status in statuses for one in status.replicas]
        return Sample(
            at_s=self._clock.now_s,
            waiting=sum(status.waiting for status in statuses),
            live=sum(status.live for status in statuses),
            committed_tokens=sum(one.committed_tokens for one in replicas),
            busy_s=sum(one.busy_s for one in replicas),
            pool_busy_s=sum(world.report.pool_busy_s for world in self._worlds),
            pool_behind_s=max(world.pool_behind_s for world in self._worlds),
        )


def _over(amount: float, by: float) -> float:
    return amount / by if by else 0.0
