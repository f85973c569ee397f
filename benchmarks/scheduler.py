"""What the scheduler costs per event and per order, from 1,000 to 100,000 live sequences.

It drives `Scheduler.step` with answers made up on the spot: no replica, no network, one process.
CPU time of this process is measured, not time on the wall, because machines are shared. The
scheduler itself needs neither Ray nor torch.

    python -m benchmarks.scheduler --json benchmarks/results/scheduler.json
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import table, write_json
from scheduler.config import SchedulerConfig
from scheduler.messages import (
    Dispatch,
    Event,
    Order,
    OrderKind,
    ReplicaJoined,
    ReplicaSpec,
    Request,
    RowResult,
    StepDone,
    StepResult,
    Submit,
)
from scheduler.scheduler import Scheduler

LIVE = (1_000, 10_000, 100_000)
REPLICAS = (1, 16, 256)
TENANTS = 20
"""Names among which the requests are spread, so that the queue has something to share."""


@dataclass
class Cost:
    """CPU time in microseconds."""

    live: int
    replicas: int
    submit_us: float
    """Per request that comes in."""
    order_us: float
    """Per answered order: booking its tokens, finishing rows, and giving out the next order."""
    order_p99_us: float
    rows_mean: float
    """Rows of the orders that were answered."""


class Load:
    """A scheduler with so many live sequences, and answers to its orders in turn."""

    def __init__(self, live: int, replicas: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        roomy = SchedulerConfig(waiting_requests_max=2 * live, waiting_tokens_max=1000 * live)
        self._scheduler = Scheduler(roomy)
        self._orders: deque[Order] = deque()
        self._now_s = 0.0
        self._number = 0
        self._live = live
        self.rows = 0
        spec = ReplicaSpec(kv_blocks=100_000, block_size=16, context_len=8192, vocab_size=1000)
        for index in range(replicas):
            self._tell(ReplicaJoined(f"r{index}", spec))

    def submit(self) -> None:
        self._number += 1
        draw = self._rng
        request = Request(
            id=f"q{self._number}",
            prompt=(1,) * draw.randint(10, 300),
            max_new_tokens=draw.randint(50, 200),
            tenant=f"tenant {draw.randrange(TENANTS)}",
        )
        self._tell(Submit(request))

    def answer(self) -> float:
        """Answer the oldest order; returns the CPU seconds of the scheduler alone."""
        order = self._orders.popleft()
        self._now_s += 1e-3
        self.rows += len(order.prefill or order.rows)
        event = StepDone(StepResult(order.id, order.replica_id, self._results(order), steps=1))
        began_s = time.process_time()
        self._tell(event)
        return time.process_time() - began_s

    def refill(self) -> None:
        """As many requests as have finished come in anew."""
        while self._scheduler.snapshot().live < self._live:
            self.submit()

    def _results(self, order: Order) -> tuple[RowResult, ...]:
        if order.kind is OrderKind.PREFILL:
            return tuple(RowResult(row.sequence_id) for row in order.prefill)
        draw = self._rng
        return tuple(
            RowResult(
                row.sequence_id,
                (5,) * draw.randint(1, row.draft_len + 1),
                1,
                row.draft_len,
                (1,) * row.draft_len,
            )
            for row in order.rows
        )

    def _tell(self, event: Event) -> None:
        for action in self._scheduler.step(event, self._now_s):
            if isinstance(action, Dispatch):
                self._orders.append(action.order)


def measure(live: int, replicas: int, orders: int) -> Cost:
    load = Load(live, replicas)
    began_s = time.process_time()
    for _ in range(live):
        load.submit()
    submit_s = time.process_time() - began_s
    # Some orders first, so that groups are mixed and rows are of all ages.
    for _ in range(orders // 2):
        load.answer()
    load.refill()
    load.rows = 0
    times = []
    for _ in range(orders):
        times.append(load.answer())
        if len(times) % 200 == 0:
            load.refill()
    times.sort()
    return Cost(
        live=live,
        replicas=replicas,
        submit_us=1e6 * submit_s / live,
        order_us=1e6 * sum(times) / orders,
        order_p99_us=1e6 * times[int(0.99 * orders)],
        rows_mean=load.rows / orders,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--orders", type=int, default=4000, help="orders answered per figure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    costs = [measure(live, count, options.orders) for live in LIVE for count in REPLICAS]
    header = ("live sequences", "replicas", "us per submit", "us per order", "p99", "rows")
    print(table(header, [[cost.live, cost.replicas, *_rounded(cost)] for cost in costs]))
    write_json(options.json, {"costs": [asdict(cost) for cost in costs]})


def _rounded(cost: Cost) -> list[str]:
    times = (cost.submit_us, cost.order_us, cost.order_p99_us)
    return [*(f"{time_us:.0f}" for time_us in times), f"{cost.rows_mean:.1f}"]


if __name__ == "__main__":
    main()
