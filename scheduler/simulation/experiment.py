"""A workload on many replicas in virtual time, and the figures of it.

Shards are worlds on one clock; each request goes to the one that `choose_shard` says, as in a
cluster. Latencies are those at the pool: from a request's arrival at a frontend, with the way to
the pool, to the pool's answer; tokenizing and the way to the client are not in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from scheduler.config import SchedulerConfig
from scheduler.messages import Action, Event, Finish, Reject, ReplicaSpec, Request
from scheduler.scaling import ShardLoad, choose_shard, merged_status, shard_of_rank
from scheduler.simulation.clock import VirtualClock
from scheduler.simulation.hardware import Times
from scheduler.simulation.workload import WorkloadRequest
from scheduler.simulation.world import FaultPlan, RequestOutcome, World
from scheduler.state import BatchFigures
from scheduler.status import PoolStatus

SAMPLES_MAX = 100
"""Samples of a run, beside the first one."""


MEASURED_POOL_S = 0.6e-3
"""All CPU time of a pool's process over the batches that it gave out, requests and messages
included, as `benchmarks.cluster` measures it on two cores with 64 requests in flight: 0.50 to
0.61 ms with 4 replicas, 0.39 to 0.45 with 16, 0.95 to 1.03 with one. A busier pool takes less per
batch, so near its limit this is pessimistic."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Replicas, pools and how they work."""

    replicas: int
    spec: ReplicaSpec
    times: Times
    config: SchedulerConfig
    shards: int = 1
    pool_batch_s: float = 0.0
    """For which a result, with the next batch that it leads to, occupies a pool."""
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


@dataclass(slots=True)
class Figures:
    """The figures of an experiment. Times are virtual seconds, one entry per finished request."""

    samples: list[Sample] = field(default_factory=list)
    """The first when the first request comes, others whenever so many have ended, the last when the
    last one ends."""
    latency_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    """From the first Emit to the last, over the tokens after the first, where there are some."""
    refusals: list[str] = field(default_factory=list)
    """Why requests were refused, one by one."""
    sums: BatchFigures = field(default_factory=BatchFigures)
    """Of all replicas."""

    @property
    def finished(self) -> int:
        return len(self.latency_s)

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return self.samples[-1].committed_tokens

    @property
    def waiting_most(self) -> int:
        """The most that waited, in all shards together; a peak between two samples is missed."""
        return max(sample.waiting for sample in self.samples)

    @property
    def elapsed_s(self) -> float:
        return self.samples[-1].at_s - self.samples[0].at_s

    def tokens_per_s(self) -> float:
        """Over the middle half of the requests, or over all where that takes no time."""
        return self._growth_per_s("committed_tokens")

    def utilisation(self, replicas: int) -> float:
        """Share of the replicas' time in which they ran batches, likewise."""
        return self._growth_per_s("busy_s") / replicas

    def pool_utilisation(self, shards: int) -> float:
        """Share of the pools' time in which they were occupied, likewise."""
        return self._growth_per_s("pool_busy_s") / shards

    def _growth_per_s(self, name: str) -> float:
        count = len(self.samples) - 1
        first, last = self.samples[count // 4], self.samples[3 * count // 4]
        if count < 4 or first.at_s == last.at_s:
            first, last = self.samples[0], self.samples[-1]
        spent_s = last.at_s - first.at_s
        return (getattr(last, name) - getattr(first, name)) / spent_s if spent_s else 0.0


class Experiment:
    """One run: `Experiment(setup, requests, rng).run()`."""

    def __init__(self, setup: Setup, requests: Sequence[WorkloadRequest], rng: Random) -> None:
        """`requests` rise by time; `rng` draws the delays of messages and accepted tokens."""
        assert requests, "an experiment without requests"
        assert setup.replicas >= setup.shards >= 1, "every shard needs a replica"
        self._setup = setup
        self._requests = requests
        self._rng = rng
        self._clock = VirtualClock()
        self._figures = Figures()
        self._sample_every = -(-len(requests) // SAMPLES_MAX)
        self._coming = iter(enumerate(requests))
        self._arrived: list[tuple[float, int]] = []
        """By request: when, and the shard that it went to."""
        self._ended = 0
        self._outstanding = [0] * setup.shards
        """New tokens of the requests that were sent to a shard and have not ended."""
        self._serving = [0] * setup.shards
        self._worlds = [self._world() for _ in range(setup.shards)]
        for rank in range(setup.replicas):
            shard = shard_of_rank(rank, setup.shards)
            self._serving[shard] += 1
            self._worlds[shard].join(0.0, f"r{rank}", setup.spec)

    def _world(self) -> World:
        setup = self._setup

        def watch(now_s: float, event: Event, actions: list[Action]) -> None:
            for action in actions:
                if isinstance(action, Finish | Reject):
                    self._end(int(action.request_id), world.report.outcomes.pop(action.request_id))

        world = World(
            self._rng,
            setup.times,
            setup.config,
            faults=FaultPlan(delay_s=setup.message_s),
            watch=watch,
            clock=self._clock,
            pool_batch_s=setup.pool_batch_s,
        )
        return world

    def run(self) -> Figures:
        for _ in range(self._setup.in_flight or 1):
            self._plan_next()
        self._clock.run()
        assert self._ended == len(self._requests), "requests were lost"
        self._figures.sums = self._status().figures
        return self._figures

    def _status(self) -> PoolStatus:
        return merged_status([world.scheduler.snapshot() for world in self._worlds])

    # ----------------------------------------------------------------- requests

    def _plan_next(self) -> None:
        number, request = next(self._coming, (0, None))
        if request is not None:
            self._clock.at(request.at_s, lambda: self._arrive(number, request))

    def _arrive(self, number: int, request: WorkloadRequest) -> None:
        now_s = self._clock.now_s
        if number == 0:
            self._figures.samples.append(self._sample())
        if self._setup.in_flight is None:
            self._plan_next()
        loads = [
            ShardLoad(serving, outstanding)
            for serving, outstanding in zip(self._serving, self._outstanding, strict=True)
        ]
        length = request.prompt_tokens + request.new_tokens
        shard = choose_shard(loads, request.new_tokens, 0, length)
        self._outstanding[shard] += request.new_tokens
        self._arrived.append((now_s, shard))
        prompt = (1,) * request.prompt_tokens
        submitted = Request(str(number), prompt, max_new_tokens=request.new_tokens)
        at_s = now_s + self._rng.uniform(*self._setup.message_s)
        self._worlds[shard].submit(at_s, submitted, request.acceptance)

    def _end(self, number: int, outcome: RequestOutcome) -> None:
        figures, count = self._figures, len(self._requests)
        arrived_s, shard = self._arrived[number]
        self._outstanding[shard] -= self._requests[number].new_tokens
        self._ended += 1
        if self._ended % self._sample_every == 0 or self._ended == count:
            figures.samples.append(self._sample())
        if self._setup.in_flight is not None:
            self._plan_next()
        if isinstance(outcome.end, Reject):
            named = filter(None, (outcome.end.field, outcome.end.message))
            figures.refusals.append(": ".join(named))
            return
        assert outcome.finished_s is not None
        assert outcome.first_token_s is not None, "a request failed"
        figures.latency_s.append(outcome.finished_s - arrived_s)
        figures.first_token_s.append(outcome.first_token_s - arrived_s)
        # As in `lockstep bench`: tokens that come at once took no time of their own.
        later = len(outcome.tokens) - outcome.first_tokens
        if later:
            figures.per_token_s.append((outcome.finished_s - outcome.first_token_s) / later)

    def _sample(self) -> Sample:
        status = self._status()
        sums = status.figures
        return Sample(
            at_s=self._clock.now_s,
            waiting=status.waiting,
            live=status.live,
            committed_tokens=sums.committed_tokens,
            busy_s=sums.busy_s,
            pool_busy_s=sum(world.report.pool_busy_s for world in self._worlds),
        )
