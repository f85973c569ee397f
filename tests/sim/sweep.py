"""One world of many: its seed and knobs drawn from a seed and a number, run and checked.

In a module of its own so that other processes can import it. What must hold is in `worlds`.
"""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from random import Random
from types import FrameType

from tests.sim.worlds import LONGEST_S, Knobs, build, check

WORLD_S_MAX = 120
"""Wall-clock seconds after which a world counts as stuck."""


def draw(seed: int, number: int) -> tuple[int, Knobs]:
    """The seed and the knobs of world `number`: the same for ever, whatever ran before."""
    rng = Random(f"{seed}/{number}")
    drawn = {
        "requests": rng.choice([1, 3, 10, 20, 30, 40, 80, 150]),
        "replicas": rng.randint(1, 5),
        "rows_max": rng.choice([1, 2, 3, 4, 8, 16]),
        "batches_in_flight_max": rng.randint(1, 4),
        "passes_max": rng.randint(1, 6),
        "steps_per_batch_max": rng.choice([1, 2, 4, 8]),
        "residents_max": rng.choice([1, 2, 5, 16, 64]),
        "waiting_requests_max": rng.choice([3, 20, *[4096] * 6]),
        "trouble": rng.random() < 0.7,
        "deaths": rng.choice([0, 0, 1, 2, 4, 8]),
        "drains": rng.choice([0, 0, 1, 2, 4]),
        "cancels": rng.choice([0, 0, 2, 6, 20]),
        "deadly": rng.choice([0, 0, 0, 1, 2]),
        "kv_reserve": rng.choice([0.0, 0.25, 0.5, 1.0]),
        "wait_rounds": rng.choice([1, 2, 4, 4, 7]),
        "pinned": rng.choice([0.0, 0.0, 0.05, 0.3, 1.0]),
        "spread_max": rng.choice([*[None] * 6, 0, 10]),
    }
    known = {field.name for field in fields(Knobs)}
    assert set(drawn) <= known, f"no such knobs: {set(drawn) - known}"
    return rng.randrange(2**32), Knobs(**drawn)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Told:
    """How one world went."""

    number: int
    failure: str
    ends: dict[str, int]
    recovered: int = 0
    preempted: int = 0
    moved: int = 0
    killed: int = 0


class WorldStuck(Exception):
    """A world ran for too long on the wall clock."""


@contextmanager
def _bounded(seconds: int) -> Iterator[None]:
    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise WorldStuck(f"still running after {seconds} s of wall clock")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_world(number: int, seed: int) -> Told:
    """Builds, runs and checks one world. Never raises for a world that is wrong."""
    world_seed, knobs = draw(seed, number)
    try:
        with _bounded(WORLD_S_MAX):
            world, requests = build(world_seed, knobs)
            report = world.run(LONGEST_S)
            check(world, requests, report, knobs)
    except Exception:
        return Told(number, traceback.format_exc(), {})
    ends: Counter[str] = Counter()
    for outcome in report.outcomes.values():
        ends["refused" if outcome.finish is None else outcome.finish.reason.value] += 1
    status = world.scheduler.snapshot()
    return Told(number, "", ends, status.recovered, status.preempted, status.moved, report.killed)
