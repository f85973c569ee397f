"""The same profile on up to 256 simulated replicas, in virtual time, by the same policy."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.loadtest.load_profile import AUTOSCALING, END_S, LOAD_S, NEW_TOKENS, share_at
from benchmarks.shared.synthetic import Speed
from scheduler.config import SchedulerConfig
from scheduler.messages import Action, Event, Finish, ReplicaSpec, Request
from scheduler.scaling import (
    LOOK_S,
    AutoscalingConfig,
    CapacityMeter,
    ScalingState,
    wanted_replicas,
)
from scheduler.simulation import FaultPlan, World, poisson
from scheduler.simulation.clock import VirtualClock

REPLICAS = 256
"""Against four real ones."""
PEAK_PER_S = 160.0
"""Requests; replicas of 90 tokens/s serve them with 256 or somewhat fewer."""
SPEED = Speed(step_s=0.25, prefill_s=0.25, start_s=0.0, acceptance=0.7)
NONE = FaultPlan(rejoin_s=float("inf"))
"""What leaves does not come back by itself."""


@dataclass
class Simulated:
    """Samples as of the real run, and the calls."""

    samples: list[dict[str, float]]
    calls: list[dict[str, Any]]


def simulate(start_s: float, spec: ReplicaSpec, seed: int = 1) -> Simulated:
    """`start_s`: what a replica takes to start."""
    rng, clock = Random(seed), VirtualClock()
    config = AutoscalingConfig(**{**AUTOSCALING, "max_replicas": REPLICAS})
    scheduler = SchedulerConfig()
    begun: dict[str, float] = {}
    calls: list[dict[str, Any]] = []
    samples: list[dict[str, float]] = []

    def watch(now_s: float, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Finish):
                outcome = world.report.outcomes.pop(action.request_id)
                at_s = begun.pop(action.request_id)
                first_s = (outcome.first_token_s or now_s) - at_s
                calls.append({"at": at_s, "first": first_s, "total": now_s - at_s, "error": ""})

    world = World(rng, SPEED.times, scheduler, faults=NONE, watch=watch, clock=clock)
    state, wanted, number = ScalingState(), 0, 0
    meter = CapacityMeter(config.tokens_per_s, scheduler.rows_max)
    there: list[str] = []

    def look() -> None:
        nonlocal state, wanted, number
        status = world.scheduler.snapshot()
        before = wanted
        wanted, state = wanted_replicas(
            config, status, meter.look(status), wanted, state, clock.now_s
        )
        for _ in range(wanted - before):
            there.append(f"r{number}")
            world.join(clock.now_s + start_s, there[-1], spec)
            number += 1
        for _ in range(before - wanted):
            world.drain(clock.now_s, there.pop(), 2.0)
        figures = {"at": clock.now_s, "wanted": wanted, "serving": status.serving}
        figures |= {"waiting": status.waiting, "tokens_per_s": status.tokens_per_s}
        samples.append(figures)
        # An event that says nothing: the pool's time goes on.
        world.cancel(clock.now_s, "nobody's")
        if clock.now_s < END_S:
            clock.at(clock.now_s + LOOK_S, look)

    clock.at(0.0, look)
    for count, at_s in enumerate(poisson(PEAK_PER_S, rng)):
        if at_s >= LOAD_S:
            break
        if rng.random() < share_at(at_s):
            begun[str(count)] = at_s
            world.submit(at_s, Request(str(count), (1,) * 16, NEW_TOKENS))
    world.run(END_S)
    return Simulated(samples, calls)
