"""One pool in virtual time: the real scheduler, simulated replicas, and faults drawn from a seed.

It runs `Scheduler.step`, never a copy of it: what holds here holds in a cluster. All chance comes
from the generator that is passed in, so a seed replays a world exactly.

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

from scheduler.config import SchedulerConfig
from scheduler.messages import (
    Action,
    Batch,
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
from scheduler.simulation.clock import VirtualClock
from scheduler.simulation.hardware import Times
from scheduler.simulation.simulated_replica import SimulatedReplica

TICK_S = 0.05

Watch = Callable[[float, Event, list[Action]], None]
"""Called after every event: (now_s, event, its actions)."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong: of the network, of batches, of replicas. Probabilities are per batch."""

    delay_s: tuple[float, float] = (0.0005, 0.0015)
    """Least and most time of a message, uniform."""
    duplicate: float = 0.0
    """Probability that a result arrives twice."""
    lose: float = 0.0
    """Probability that a result never arrives."""
    late: float = 0.0
    """Probability that a result arrives only when its replica was lost and has joined again."""
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
class RequestOutcome:
    """What happened to one request."""

    submitted_s: float
    acceptance: float
    tokens: list[int] = field(default_factory=list)
    """As emitted; carried tokens are not among them."""
    first_token_s: float | None = None
    first_tokens: int = 0
    """How many tokens came with the first Emit."""
    finished_s: float | None = None
    end: Finish | Reject | None = None
    ends: int = 0
    """How many Finish and Reject actions came; exactly one is right."""


@dataclass(slots=True)
class Report:
    """What happened in a world. Times are virtual seconds."""

    outcomes: dict[str, RequestOutcome] = field(default_factory=dict)
    ended_s: float = 0.0
    killed: int = 0
    """Replicas killed by deadly requests."""
    pool_busy_s: float = 0.0
    """Time in which the pool was occupied."""


@dataclass(slots=True, eq=False)
class _Host:
    """The process around a simulated replica: its queue, its connection, its life."""

    name: str
    replica: SimulatedReplica
    alive: bool = True
    queue: deque[Batch] = field(default_factory=deque)
    """The first one runs."""
    interrupted: int = 0
    """Batches up to this id end after the step in hand."""
    received_s: float = 0.0
    """When the last message to it arrives; the next one is not earlier."""


class World:
    """A scheduler, its replicas and its clients under one virtual clock."""

    def __init__(
        self,
        rng: Random,
        times: Times,
        config: SchedulerConfig | None = None,
        *,
        faults: FaultPlan | None = None,
        watch: Watch | None = None,
        clock: VirtualClock | None = None,
        pool_batch_s: float = 0.0,
    ) -> None:
        """`clock`: one that other worlds share. `pool_batch_s`: for how long a result occupies the
        pool; the next event waits, and the result's actions come after."""
        self.scheduler = Scheduler(config)
        self.report = Report()
        self.faults = faults or FaultPlan()
        self._clock = clock or VirtualClock()
        self._rng = rng
        self._times = times
        self._watch = watch
        self._pool_batch_s = pool_batch_s
        self._pool_free_s = 0.0
        """When the pool has done all events that have reached it."""
        self._hosts: dict[str, _Host] = {}
        """Hosts by replica id, dead ones until they are declared lost."""
        self._incarnations: dict[str, int] = {}
        self._unfinished = 0

    @property
    def residents(self) -> int:
        """Sequences that hold KV blocks of a replica."""
        return sum(len(host.replica.residents) for host in self._hosts.values())

    # ----------------------------------------------------------------- what is to happen

    def submit(self, at_s: float, request: Request, acceptance: float = 0.7) -> None:
        """A request arrives; its id must be new in this world.

        Each of its draft tokens is accepted with this probability if those before it are.
        """
        assert request.id not in self.report.outcomes, f"{request.id} was submitted before"
        self.report.outcomes[request.id] = RequestOutcome(at_s, acceptance)
        self._unfinished += 1
        self._clock.at(at_s, lambda: self._tell(Submit(request)))

    def cancel(self, at_s: float, request_id: str) -> None:
        self._clock.at(at_s, lambda: self._tell(Cancel(request_id)))

    def join(self, at_s: float, name: str, spec: ReplicaSpec) -> None:
        """A replica joins as `name`, and after each death as `name+1`, `name+2`, ..."""
        self._clock.at(at_s, lambda: self._join(name, spec))

    def drain(self, at_s: float, name: str, leave_s: float) -> None:
        """The replica called `name` at that time drains, and leaves `leave_s` later."""

        def drain(host: _Host) -> None:
            self._tell(ReplicaDraining(host.replica.id))
            self._clock.after(leave_s, lambda: self._die(host, 0.0))

        self._clock.at(at_s, lambda: self._with_host(name, drain))

    def kill(self, at_s: float, name: str) -> None:
        """The replica called `name` at that time dies; the pool learns of it by the lease."""
        self._clock.at(at_s, lambda: self._with_host(name, self._die))

    def run(self, until_s: float = float("inf")) -> Report:
        """Runs with ticks until nothing is left to happen, or until the virtual time `until_s`."""
        self._clock.after(TICK_S, self._tick)
        self._clock.run(until_s)
        self.report.ended_s = self._clock.now_s
        return self.report

    def _tick(self) -> None:
        self._tell(Tick())
        if self._unfinished:
            self._clock.after(TICK_S, self._tick)

    # ----------------------------------------------------------------- the pool's side

    def _tell(self, event: Event) -> None:
        """An event reaches the pool, which does one after the other."""
        cost_s = self._pool_batch_s if isinstance(event, StepDone) else 0.0
        self._pool_free_s = max(self._clock.now_s, self._pool_free_s) + cost_s
        self._clock.at(self._pool_free_s, lambda: self._step(event, cost_s))

    def _step(self, event: Event, cost_s: float) -> None:
        self.report.pool_busy_s += cost_s
        now_s = self._clock.now_s
        actions = self.scheduler.step(event, now_s)
        for action in actions:
            match action:
                case Emit():
                    self._emit(action)
                case Finish() | Reject():
                    self._end(action)
                case Release() | Interrupt():
                    self._send(action.replica_id, action)
                case Dispatch():
                    self._send(action.batch.replica_id, action)
        if self._watch is not None:
            self._watch(now_s, event, actions)

    def _emit(self, action: Emit) -> None:
        outcome = self.report.outcomes[action.request_id]
        outcome.tokens.extend(action.tokens)
        if outcome.first_token_s is None:
            outcome.first_token_s = self._clock.now_s
            outcome.first_tokens = len(action.tokens)

    def _end(self, action: Finish | Reject) -> None:
        outcome = self.report.outcomes[action.request_id]
        outcome.ends += 1
        outcome.finished_s = self._clock.now_s
        outcome.end = action
        self._unfinished -= 1

    # ----------------------------------------------------------------- the replicas' side

    def _with_host(self, name: str, act: Callable[[_Host], None]) -> None:
        for host in list(self._hosts.values()):
            if host.name == name and host.alive:
                act(host)

    def _join(self, name: str, spec: ReplicaSpec) -> None:
        count = self._incarnations[name] = self._incarnations.get(name, -1) + 1
        replica_id = f"{name}+{count}" if count else name
        outcomes = self.report.outcomes
        replica = SimulatedReplica(
            replica_id, spec, self._times, lambda each: outcomes[each].acceptance, self._rng
        )
        self._hosts[replica_id] = _Host(name, replica)
        self._tell(ReplicaJoined(replica_id, spec))

    def _die(self, host: _Host, lease_s: float | None = None) -> None:
        """`lease_s`: when the pool learns of it; None: as the fault plan says."""
        if not host.alive:
            return
        host.alive = False

        def declare_lost() -> None:
            del self._hosts[host.replica.id]
            self._tell(ReplicaLost(host.replica.id, by_batch=True))
            spec = host.replica.spec
            self._clock.after(self.faults.rejoin_s, lambda: self._join(host.name, spec))

        self._clock.after(self.faults.lease_s if lease_s is None else lease_s, declare_lost)

    def _send(self, replica_id: str, action: Dispatch | Release | Interrupt) -> None:
        host = self._hosts.get(replica_id)
        if host is not None:
            host.received_s = max(host.received_s, self._clock.now_s + self._delay_s())
            self._clock.at(host.received_s, lambda: self._receive(host, action))

    def _receive(self, host: _Host, action: Dispatch | Release | Interrupt) -> None:
        if not host.alive:
            return
        match action:
            case Release():
                host.replica.release(action)
            case Interrupt():
                host.interrupted = action.batch_id
            case Dispatch():
                host.replica.receive(action.batch, self._clock.now_s)
                host.queue.append(action.batch)
                if len(host.queue) == 1:
                    self._start(host)

    def _start(self, host: _Host) -> None:
        batch, faults = host.queue[0], self.faults
        if any(row.sequence_id in faults.deadly for row in batch.rows):
            self.report.killed += 1
            self._die(host)
            return
        if self._happens(faults.fail) or len(batch.rows) > (faults.rows_max or len(batch.rows)):
            failed = StepFailed(host.replica.id, batch.id, "the step failed")
            step_s = self._times(batch).total_s
            self._clock.after(step_s, lambda: self._answer(host, failed))
            return
        first_s = host.replica.begin(batch, self._clock.now_s)

        def advance() -> None:
            # The work of a step is done at its end; a replica that dies in it has done nothing.
            if not host.alive:
                return
            if host.replica.advance() and batch.id > host.interrupted:
                self._clock.after(host.replica.step_s, advance)
            else:
                self._answer(host, StepDone(host.replica.end()))

        self._clock.after(first_s, advance)

    def _answer(self, host: _Host, answer: StepDone | StepFailed) -> None:
        if not host.alive:
            return
        batch = host.queue.popleft()
        if isinstance(answer, StepFailed):
            host.replica.fail(batch)
        if host.queue:
            self._start(host)
        faults = self.faults
        if self._happens(faults.lose):
            self._die(host)
        elif self._happens(faults.late):
            self._die(host)
            late_s = faults.lease_s + faults.rejoin_s + self._delay_s()
            self._clock.after(late_s, lambda: self._tell(answer))
        else:
            self._clock.after(self._delay_s(), lambda: self._tell(answer))
            if self._happens(faults.duplicate):
                self._clock.after(2 * self._delay_s(), lambda: self._tell(answer))

    def _happens(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _delay_s(self) -> float:
        return self._rng.uniform(*self.faults.delay_s)
