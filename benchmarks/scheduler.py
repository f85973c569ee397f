"""What the scheduler costs per batch and per event, from 1,000 to 100,000 live sequences.

It drives `Scheduler.step` with the answers of simulated replicas: no network, one process. Answers
come when a small GPU would give them, in virtual time, so that the policy learns, and drafts.
A batch's time is that of its StepDone: its tokens are booked, rows finish, waiting ones are placed
and the next batch is given out. The pool is in the midst of its work: replicas are as full as they
get and rows are of all ages. CPU time of this process is measured, not time on the wall, because
machines are shared; even so a busy neighbour costs up to twice, so there are several rounds, of
which the least and the median stand beside each other, and a fixed loop (`probe_us`) is timed
between them. The scheduler itself needs neither Ray nor torch.

    python -m benchmarks.scheduler --json benchmarks/results/scheduler.json
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from statistics import fmean, median

from benchmarks.shared.command_line import parser_of
from benchmarks.shared.linear import LinearCost, LinearTimes
from benchmarks.shared.report import table, write_json
from cluster.pool.ray_pool import collect_seldom
from scheduler.config import SchedulerConfig
from scheduler.messages import (
    Action,
    Batch,
    Cancel,
    Dispatch,
    Event,
    Finish,
    Release,
    ReplicaJoined,
    ReplicaSpec,
    Request,
    StepDone,
    Submit,
    Tick,
)
from scheduler.scheduler import Scheduler
from scheduler.simulation import SimulatedReplica

LIVE = (1_000, 10_000, 100_000)
REPLICAS = (1, 16, 256)
ROUNDS = 7
TENANTS = 20
"""Names among which the requests are spread, so that the queue has something to share."""
ACCEPTANCE = 0.7
"""Of a draft token."""
TIMES = LinearTimes(
    draft=LinearCost(1e-3),
    verify=LinearCost(8e-3, 2e-5, 1e-8),
    prefill=LinearCost(1e-3, 2e-5),
    rest_s=5e-4,
)
"""Like a small GPU's."""
ANSWER_DELAY_S = 3e-4
"""Between a batch's end and its answer."""
EVENTS = 200
"""Submits, cancels and ticks of a round."""


@dataclass
class Rounds:
    """CPU time in microseconds: the means of the rounds."""

    least: float
    median: float

    @staticmethod
    def of(means_us: list[float]) -> Rounds:
        return Rounds(round(min(means_us), 1), round(median(means_us), 1))


@dataclass
class Cost:
    """What batches and events cost with so many live sequences on so many replicas."""

    live: int
    replicas: int
    rows: float
    """Mean rows of the batches that were answered."""
    batch_us: Rounds
    batch_p99_us: Rounds
    submit_us: Rounds
    cancel_us: Rounds
    tick_us: Rounds


@dataclass
class Times:
    """One round, seconds each."""

    batches: list[float] = field(default_factory=list)
    submits: list[float] = field(default_factory=list)
    cancels: list[float] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)


class Load:
    """A scheduler with so many live sequences, and answers to its batches in turn."""

    def __init__(self, live: int, replicas: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        roomy = SchedulerConfig(
            rows_max=8, waiting_requests_max=2 * live, waiting_tokens_max=1000 * live
        )
        self._scheduler = Scheduler(roomy)
        self._batches: list[tuple[float, int, Batch]] = []
        """A heap of (time of the answer [s], id, batch)."""
        self._replicas: dict[str, SimulatedReplica] = {}
        self._busy_until_s: dict[str, float] = {}
        self._now_s = 0.0
        self._number = 0
        self._live = 0
        self._live_most = live
        self._residents_most = replicas * roomy.residents_max
        self.rows = 0
        self.answered = 0
        spec = ReplicaSpec(
            kv_blocks=100_000,
            block_size=16,
            context_len=8192,
            vocab_size=1000,
        )
        for name in (f"r{index}" for index in range(replicas)):
            self._replicas[name] = SimulatedReplica(
                name, spec, TIMES, lambda request_id: ACCEPTANCE, self._rng
            )
            self._tell(ReplicaJoined(name, spec))
        while self._live < live:
            # In the midst of things those that are there are half done, on average.
            self.submit(self._rng.randint(1, 200))
        enough = 0.98 * min(live, self._residents_most)
        while sum(view.residents for view in self._scheduler.snapshot().replicas) < enough:
            for _ in range(max(replicas, 100)):
                self.answer()
            self.refill()

    def submit(self, new_tokens: int | None = None) -> float:
        """One more request; every second one has a deadline. Returns CPU seconds."""
        self._number += 1
        draw = self._rng
        request = Request(
            id=f"q{self._number}",
            prompt=(1,) * draw.randint(10, 300),
            max_new_tokens=new_tokens or draw.randint(50, 200),
            timeout_s=draw.choice([None, 3600.0]),
            tenant=f"tenant {draw.randrange(TENANTS)}",
        )
        self._live += 1
        return self._tell(Submit(request))

    def cancel(self) -> float:
        """Somebody leaves: any request, old or new, waiting or not."""
        alive = self._scheduler.pool.sequences
        while (name := f"q{self._rng.randint(1, self._number)}") not in alive:
            pass
        return self._tell(Cancel(name))

    def tick(self) -> float:
        return self._tell(Tick())

    def answer(self) -> float:
        """Answer the oldest batch; returns the CPU seconds of the scheduler alone."""
        self._now_s, _, batch = heappop(self._batches)
        self.rows += len(batch.prefill or batch.rows)
        self.answered += 1
        replica = self._replicas[batch.replica_id]
        replica.begin(batch)
        replica.advance()  # no more than one step, as where other rows wait
        return self._tell(StepDone(replica.end()))

    def refill(self) -> None:
        """As many requests as have finished come in anew."""
        while self._live < self._live_most:
            self.submit()

    def _run(self, batch: Batch) -> None:
        """It runs once its replica has done the one before it."""
        self._replicas[batch.replica_id].receive(batch)
        began_s = max(self._now_s, self._busy_until_s.get(batch.replica_id, 0.0))
        done_s = self._busy_until_s[batch.replica_id] = began_s + TIMES(batch).total_s
        heappush(self._batches, (done_s + ANSWER_DELAY_S, batch.id, batch))

    def _tell(self, event: Event) -> float:
        began_s = time.process_time()
        actions: list[Action] = self._scheduler.step(event, self._now_s)
        took_s = time.process_time() - began_s
        for action in actions:
            if isinstance(action, Dispatch):
                self._run(action.batch)
            elif isinstance(action, Release):
                self._replicas[action.replica_id].release(action)
            elif isinstance(action, Finish):
                self._live -= 1
        return took_s


def one_round(load: Load, batches: int) -> Times:
    """Some batches, with as many new requests as finish, then some events of each kind."""
    times = Times()
    for number in range(batches):
        times.batches.append(load.answer())
        if number % 20 == 19:
            load.refill()
    for _ in range(EVENTS):
        times.cancels.append(load.cancel())
        times.submits.append(load.submit())
        times.ticks.append(load.tick())
    return times


def measure(live: int, replicas: int, batches: int) -> Cost:
    load = Load(live, replicas)
    # What the full pool is like only shows after every replica has answered some more.
    one_round(load, max(batches, 10 * replicas))
    load.rows = load.answered = 0
    rounds = [one_round(load, batches) for _ in range(ROUNDS)]
    return Cost(
        live=live,
        replicas=replicas,
        rows=round(load.rows / load.answered, 2),
        batch_us=_rounds(rounds, lambda times: fmean(times.batches)),
        batch_p99_us=_rounds(rounds, lambda times: sorted(times.batches)[int(0.99 * batches)]),
        submit_us=_rounds(rounds, lambda times: fmean(times.submits)),
        cancel_us=_rounds(rounds, lambda times: fmean(times.cancels)),
        tick_us=_rounds(rounds, lambda times: fmean(times.ticks)),
    )


def _rounds(rounds: list[Times], figure: Callable[[Times], float]) -> Rounds:
    return Rounds.of([1e6 * figure(times) for times in rounds])


def probe_us() -> float:
    """CPU time of a fixed loop that fits into any cache: what the machine gives at the moment."""
    began_s = time.process_time()
    total = 0
    for number in range(100_000):
        total += number & 7
    assert total > 0
    return 1e6 * (time.process_time() - began_s)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batches", type=int, default=2000, help="batches answered per round")
    options = parser.parse_args()
    collect_seldom()  # as the pool's process does
    costs: list[Cost] = []
    probes: list[float] = []
    for live in LIVE:
        for count in REPLICAS:
            costs.append(measure(live, count, options.batches))
            probes.append(probe_us())
    header = ("live sequences", "replicas", "rows", *(f"us per {each}" for each in _FIGURES))
    print(table(header, [[cost.live, cost.replicas, cost.rows, *_cells(cost)] for cost in costs]))
    print("least / median of the rounds")
    figures = {
        "batches_per_round": options.batches,
        "rounds": ROUNDS,
        "probe_us": asdict(Rounds.of(probes)),
        "costs": [asdict(cost) for cost in costs],
    }
    write_json(options.json, figures)


_FIGURES = ("batch", "batch, p99", "submit", "cancel", "tick")


def _cells(cost: Cost) -> list[str]:
    rounds = (cost.batch_us, cost.batch_p99_us, cost.submit_us, cost.cancel_us, cost.tick_us)
    return [f"{figures.least:.0f} / {figures.median:.0f}" for figures in rounds]


if __name__ == "__main__":
    main()
