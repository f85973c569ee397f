"""A virtual clock that turns the real scheduler, with fake replicas and seeded trouble.

It runs `Scheduler.step`, never a copy of it: what holds here holds in a cluster. Time is virtual,
all chance comes from the generator that is passed in, so a seed replays a world exactly.

A world is filled with `submit`, `cancel`, `join`, `drain` and `kill` at virtual times and then
run. Messages to one replica keep their order, as over its one connection; results may overtake
each other, arrive twice or not at all. A lost result or a dead replica ends in ReplicaLost after
the lease, and the replica joins again under a new id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from scheduler.batches import batch_spread, prefill_tokens
from scheduler.config import SchedulerConfig
from scheduler.fake_replica import FakeReplica
from scheduler.messages import (
    Action,
    Batch,
    BatchKind,
    Cancel,
    Dispatch,
    Emit,
    Event,
    Finish,
    Interrupt,
    Reject,
    Release,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    ReplicaSpec,
    Request,
    StepDone,
    StepFailed,
    Submit,
    Tick,
)
from scheduler.scheduler import Scheduler
from scheduler.simulated import SimulatedReplica
from scheduler.virtual_clock import VirtualClock

StepTime = Callable[[Batch], float]
"""Seconds that a replica takes for one step of a batch (for all of it, if it is a prefill)."""

Watch = Callable[[float, Event, list[Action]], None]
"""Told of every event and its actions: (now_s, event, actions)."""

PoolCost = Callable[[Event], float]
"""Seconds for which an event occupies the pool; the next one waits, and its actions come after."""


def linear_step_time(batch: Batch) -> float:
    """A small fixed cost and a part per token, in seconds; for worlds that need just some time."""
    if batch.kind is BatchKind.PREFILL:
        return 0.002 + 5e-6 * prefill_tokens(batch)
    return 0.004 + 2e-5 * sum(row.draft_len + 1 for row in batch.rows)


@dataclass(frozen=True, slots=True)
class Trouble:
    """How bad the network and the replicas are; probabilities are per batch."""

    delay_s: tuple[float, float] = (0.0005, 0.0015)
    """Least and most time of a message, uniform."""
    duplicate: float = 0.0
    """Probability that a result arrives twice."""
    lose: float = 0.0
    """Probability that a result never arrives."""
    late: float = 0.0
    """Probability that a result arrives only when its replica has long been declared lost and has
    joined again."""
    fail: float = 0.0
    """Probability that a batch ends in StepFailed."""
    rows_max: int | None = None
    """Speculate batches with more rows always end in StepFailed, as when memory runs out."""
    deadly: frozenset[str] = frozenset()
    """Requests that kill the replica in every step with them."""
    lease_s: float = 0.5
    """Silence after which a replica is declared lost."""
    rejoin_s: float = 0.5
    """Time from then until it joins again under a new id."""


@dataclass(slots=True)
class Outcome:
    """What happened to one request."""

    submitted_s: float
    tokens: list[int] = field(default_factory=list)
    """As emitted; carried tokens are not among them."""
    first_token_s: float | None = None
    first_tokens: int = 0
    """How many came with the first news."""
    finished_s: float | None = None
    finish: Finish | None = None
    reject: Reject | None = None
    finishes: int = 0
    """How many Finish and Reject actions came; exactly one is right."""


@dataclass(slots=True)
class Report:
    """Figures of a run; times are virtual seconds."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    ended_s: float = 0.0
    events: int = 0
    batches: int = 0
    group_batches: int = 0
    """Speculate batches."""
    spread_sum: int = 0
    rows_sum: int = 0
    """Rows of all speculate batches."""
    killed: int = 0
    """Replicas killed by deadly requests."""
    pool_busy_s: float = 0.0
    """Time in which the pool was occupied, by its `PoolCost`."""
    pool_behind_s_most: float = 0.0
    """The longest that an event would have waited for the pool."""
    busy_s: float = 0.0
    alive_s: float = 0.0
    """Busy and alive time, summed over all incarnations."""

    @property
    def spread_mean(self) -> float:
        return self.spread_sum / self.group_batches if self.group_batches else 0.0

    @property
    def rows_mean(self) -> float:
        return self.rows_sum / self.group_batches if self.group_batches else 0.0

    @property
    def utilisation(self) -> float:
        """Share of the replicas' time in which they ran a batch."""
        return self.busy_s / self.alive_s if self.alive_s else 0.0


class _Host:
    """A fake replica in time: its queue of batches, its message channel, its life."""

    def __init__(self, replica: SimulatedReplica, name: str, born_s: float) -> None:
        self.replica = replica
        self.name = name
        self.born_s = born_s
        self.queue: deque[Batch] = deque()
        self.busy = False
        self.interrupted = 0
        """Batches up to this id end after the step in hand."""
        self.begun_s = 0.0
        """When the batch that it runs began."""
        self.alive = True
        self.channel_s = born_s
        """When the last message to it arrives; the next one is not earlier."""


class World:
    """A scheduler, its replicas and its clients under one virtual clock."""

    def __init__(
        self,
        rng: Random,
        config: SchedulerConfig | None = None,
        *,
        step_time: StepTime = linear_step_time,
        trouble: Trouble | None = None,
        acceptance: float = 0.7,
        tick_s: float = 0.05,
        watch: Watch | None = None,
        scheduler: Scheduler | None = None,
        clock: VirtualClock | None = None,
        pool_cost: PoolCost | None = None,
        replica: Callable[[str, ReplicaSpec], SimulatedReplica] | None = None,
        ended: Callable[[str, Outcome], None] | None = None,
    ) -> None:
        """`clock`: one that other worlds share. `pool_cost`: None for a pool that takes no time.
        `replica` makes a replica for an id and a spec, in place of a FakeReplica. `ended` is told
        of every request that has ended."""
        self.scheduler = scheduler or Scheduler(config)
        self.report = Report()
        self.clock = clock or VirtualClock()
        self._rng = rng
        self._step_time = step_time
        self.trouble = trouble or Trouble()
        self._acceptance = acceptance
        self._tick_s = tick_s
        self._watch = watch
        self._pool_cost = pool_cost
        self._pool_free_s = 0.0
        """When the pool has done all events that have reached it."""
        self._replica = replica or self._fake_replica
        self._ended = ended
        self._hosts: dict[str, _Host] = {}
        """Hosts by replica id, dead ones until they are declared lost."""
        self._incarnations: dict[str, int] = {}
        self._unfinished = 0

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    @property
    def waiting(self) -> int:
        """Requests that wait; as in the scheduler's snapshot, O(1)."""
        return self.scheduler.waiting

    @property
    def pool_behind_s(self) -> float:
        """How long an event that comes now waits for the pool."""
        return max(self._pool_free_s - self.now_s, 0.0)

    # ----------------------------------------------------------------- what is to happen

    def submit(self, at_s: float, request: Request) -> None:
        """A request arrives; its id must be new in this world."""
        assert request.id not in self.report.outcomes, f"{request.id} was submitted before"
        self.report.outcomes[request.id] = Outcome(at_s)
        self._unfinished += 1
        self._at(at_s, lambda: self._tell(Submit(request)))

    def cancel(self, at_s: float, request_id: str) -> None:
        self._at(at_s, lambda: self._tell(Cancel(request_id)))

    def join(self, at_s: float, name: str, spec: ReplicaSpec) -> None:
        """A replica joins as `name`, and after each death as `name+1`, `name+2`, ..."""
        self._at(at_s, lambda: self._join(name, spec))

    def drain(self, at_s: float, name: str, leave_s: float, rejoin: bool = True) -> None:
        """The replica called `name` at that time drains, and leaves `leave_s` later."""

        def drain() -> None:
            host = self._host(name)
            if host is not None:
                self._tell(ReplicaDraining(host.replica.id))
                self._after(leave_s, lambda: self._die(host, 0.0, rejoin))

        self._at(at_s, drain)

    def kill(self, at_s: float, name: str, rejoin: bool = True) -> None:
        """The replica called `name` at that time dies; the pool learns of it by the lease."""

        def kill() -> None:
            host = self._host(name)
            if host is not None:
                self._die(host, self.trouble.lease_s, rejoin)

        self._at(at_s, kill)

    def run(self, until_s: float = float("inf")) -> Report:
        """Runs until nothing is left to happen, or until the virtual time `until_s`."""
        self.start()
        self.clock.run(until_s)
        return self.end()

    def start(self) -> None:
        """Ticks begin; for whoever runs the clock himself."""
        self._after(self._tick_s, self._tick)

    def end(self) -> Report:
        """The report up to now."""
        self.report.ended_s = self.now_s
        for host in self._hosts.values():
            if host.alive:
                self.report.alive_s += self.now_s - host.born_s
                host.born_s = self.now_s
        return self.report

    # ----------------------------------------------------------------- clock

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        self.clock.at(at_s, happen)

    def _after(self, delay_s: float, happen: Callable[[], None]) -> None:
        self.clock.at(self.clock.now_s + delay_s, happen)

    def _tick(self) -> None:
        self._tell(Tick())
        if self._unfinished:
            self._after(self._tick_s, self._tick)

    def _delay_s(self) -> float:
        return self._rng.uniform(*self.trouble.delay_s)

    # ----------------------------------------------------------------- the pool's side

    def _tell(self, event: Event) -> None:
        """An event reaches the pool, which does one after the other."""
        if self._pool_cost is None:
            self._step(event)
            return
        cost_s = self._pool_cost(event)
        self._pool_free_s = max(self.now_s, self._pool_free_s) + cost_s
        # Between events it only falls.
        self.report.pool_behind_s_most = max(self.report.pool_behind_s_most, self.pool_behind_s)

        def do() -> None:
            self.report.pool_busy_s += cost_s
            self._step(event)

        self._at(self._pool_free_s, do)

    def _step(self, event: Event) -> None:
        actions = self.scheduler.step(event, self.now_s)
        self.report.events += 1
        for action in actions:
            match action:
                case Emit():
                    self._emit(action)
                case Finish() | Reject():
                    self._end(action)
                case Release() | Interrupt():
                    self._send(action.replica_id, action)
                case Dispatch():
                    self._note_batch(action.batch)
                    self._send(action.batch.replica_id, action)
        if self._watch is not None:
            self._watch(self.now_s, event, actions)

    def _emit(self, action: Emit) -> None:
        outcome = self.report.outcomes[action.request_id]
        outcome.tokens.extend(action.tokens)
        if outcome.first_token_s is None:
            outcome.first_token_s = self.now_s
            outcome.first_tokens = len(action.tokens)

    def _end(self, action: Finish | Reject) -> None:
        outcome = self.report.outcomes[action.request_id]
        outcome.finishes += 1
        outcome.finished_s = self.now_s
        if isinstance(action, Finish):
            outcome.finish = action
        else:
            outcome.reject = action
        self._unfinished -= 1
        if self._ended is not None:
            self._ended(action.request_id, outcome)

    def _note_batch(self, batch: Batch) -> None:
        self.report.batches += 1
        if batch.kind is BatchKind.SPECULATE:
            self.report.group_batches += 1
            self.report.rows_sum += len(batch.rows)
            self.report.spread_sum += batch_spread(batch)

    # ----------------------------------------------------------------- the replicas' side

    def _host(self, name: str) -> _Host | None:
        for host in self._hosts.values():
            if host.name == name and host.alive:
                return host
        return None

    def _fake_replica(self, replica_id: str, spec: ReplicaSpec) -> FakeReplica:
        return FakeReplica(replica_id, spec, self._acceptance, self._rng)

    def _join(self, name: str, spec: ReplicaSpec) -> None:
        count = self._incarnations.get(name, -1) + 1
        self._incarnations[name] = count
        replica_id = f"{name}+{count}" if count else name
        replica = self._replica(replica_id, spec)
        self._hosts[replica_id] = _Host(replica, name, self.now_s)
        self._tell(ReplicaJoined(replica_id, spec))

    def _die(self, host: _Host, lease_s: float, rejoin: bool) -> None:
        if not host.alive:
            return
        host.alive = False
        self.report.alive_s += self.now_s - host.born_s

        def declare_lost() -> None:
            del self._hosts[host.replica.id]
            self._tell(ReplicaLost(host.replica.id))
            if rejoin:
                self._after(self.trouble.rejoin_s, lambda: self._join(host.name, host.replica.spec))

        self._after(lease_s, declare_lost)

    def _send(self, replica_id: str, action: Dispatch | Release | Interrupt) -> None:
        host = self._hosts.get(replica_id)
        if host is None:
            return
        host.channel_s = max(host.channel_s, self.now_s + self._delay_s())
        self._at(host.channel_s, lambda: self._receive(host, action))

    def _receive(self, host: _Host, action: Dispatch | Release | Interrupt) -> None:
        if not host.alive:
            return
        if isinstance(action, Release):
            host.replica.release(action)
            return
        if isinstance(action, Interrupt):
            host.interrupted = action.batch_id
            return
        host.replica.receive(action.batch)
        host.queue.append(action.batch)
        if not host.busy:
            self._start(host)

    def _start(self, host: _Host) -> None:
        host.busy = True
        host.begun_s = self.now_s
        batch = host.queue.popleft()
        step_s = self._step_time(batch)
        trouble = self.trouble
        if any(row.sequence_id in trouble.deadly for row in batch.rows):
            self.report.killed += 1
            self._die(host, trouble.lease_s, rejoin=True)
            return
        too_many = trouble.rows_max is not None and len(batch.rows) > trouble.rows_max
        if too_many or self._rng.random() < trouble.fail:
            failed = StepFailed(host.replica.id, batch.id, "the step failed")
            self._after(step_s, lambda: self._done(host, batch, failed))
            return
        run = host.replica.begin(batch)

        def advance() -> None:
            # The work of a step is done at its end; who dies in it has done nothing.
            if not host.alive:
                return
            if run.advance() and batch.id > host.interrupted:
                self._after(step_s, advance)
            else:
                self._done(host, batch, StepDone(run.result(step_s)))

        self._after(step_s, advance)

    def _done(self, host: _Host, batch: Batch, answer: StepDone | StepFailed) -> None:
        if not host.alive:
            return
        self.report.busy_s += self.now_s - host.begun_s
        host.busy = False
        host.replica.end(batch)
        if isinstance(answer, StepFailed):
            host.replica.fail(batch)
        if host.queue:
            self._start(host)
        trouble = self.trouble
        if self._rng.random() < trouble.lose:
            self._die(host, trouble.lease_s, rejoin=True)
            return
        if self._rng.random() < trouble.late:
            self._die(host, trouble.lease_s, rejoin=True)
            late_s = trouble.lease_s + trouble.rejoin_s + self._delay_s()
            self._after(late_s, lambda: self._tell(answer))
            return
        self._after(self._delay_s(), lambda: self._tell(answer))
        if self._rng.random() < self.trouble.duplicate:
            self._after(2 * self._delay_s(), lambda: self._tell(answer))
