"""One world of many: its seed and knobs drawn from a seed and a number, run and checked.

In a module of its own so that other processes can import it. What must hold is in `worlds`.
"""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from types import FrameType

from scheduler.messages import Finish
from tests.sim.worlds import LONGEST_S, Knobs, build, check

WORLD_S_MAX = 120
"""Wall-clock seconds after which a world counts as stuck."""


def draw(seed: int, number: int) -> tuple[int, Knobs]:
    """The seed and the knobs of world `number`: the same for ever, whatever ran before."""
    rng = Random(f"{seed}/{number}")
    knobs = Knobs(
        requests=rng.choice([1, 3, 10, 20, 30, 40, 80, 150]),
        replicas=rng.randint(1, 5),
        rows_max=rng.choice([1, 2, 3, 4, 8, 16]),
        batches_in_flight_max=rng.randint(1, 4),
        steps_per_batch_max=rng.choice([1, 2, 4, 8]),
        residents_max=rng.choice([1, 2, 5, 16, 64]),
        waiting_requests_max=rng.choice([3, 20, *[4096] * 6]),
        faults=rng.random() < 0.7,
        deaths=rng.choice([0, 0, 1, 2, 4, 8]),
        drains=rng.choice([0, 0, 1, 2, 4]),
        cancels=rng.choice([0, 0, 2, 6, 20]),
        deadly=rng.choice([0, 0, 0, 1, 2]),
        kv_reserve=rng.choice([0.0, 0.25, 0.5, 1.0]),
        wait_rounds=rng.choice([1, 2, 4, 4, 7]),
    )
    return rng.randrange(2**32), knobs


@dataclass(frozen=True)
class WorldResult:
    """How one world went."""

    number: int
    failure: str = ""
    ends: Counter[str] = field(default_factory=Counter)
    """Requests by how they ended."""
    sums: Counter[str] = field(default_factory=Counter)


class WorldStuck(Exception):
    """A world ran for too long on the wall clock."""


def _ring(_signal: int, _frame: FrameType | None) -> None:
    raise WorldStuck(f"still running after {WORLD_S_MAX} s of wall clock")


def run_world(number: int, seed: int) -> WorldResult:
    """Builds, runs and checks one world. Never raises for a world that is wrong."""
    world_seed, knobs = draw(seed, number)
    before = signal.signal(signal.SIGALRM, _ring)
    signal.alarm(WORLD_S_MAX)
    try:
        world, requests = build(world_seed, knobs)
        report = world.run(LONGEST_S)
        check(world, requests, report, knobs)
    except Exception:
        return WorldResult(number, traceback.format_exc())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    ends = Counter(
        outcome.end.reason.value if isinstance(outcome.end, Finish) else "refused"
        for outcome in report.outcomes.values()
    )
    status = world.scheduler.snapshot()
    sums = Counter(
        {
            "times a place was lost": status.recovered,
            "for want of blocks": status.preempted,
            "to balance": status.moved,
            "replicas killed by deadly requests": report.killed,
        }
    )
    return WorldResult(number, ends=ends, sums=sums)
