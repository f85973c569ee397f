"""The same scheduler over the same synthetic replicas where nothing else costs any time.

Virtual time: messages take none, the scheduler takes none, clients come back at once. What a
cluster gives over this is what Ray, gRPC, the processes and their share of the CPU leave of it.
"""

from __future__ import annotations

from random import Random
from statistics import fmean

from benchmarks.cluster.closed_loop import Base, Load
from benchmarks.shared.synthetic import Speed
from scheduler.config import SchedulerConfig
from scheduler.messages import Action, Event, Finish, ReplicaSpec, Request
from scheduler.simulation import FaultPlan, World

PLAYS = 8
"""How often a load is played, each time with other luck of the drafts. That alone moves tokens/s:
with 64 requests on 4 replicas by 4 %, since at the end some of them have nothing left to do."""


def ideal(
    load: Load, spec: ReplicaSpec, speed: Speed, replicas: int, config: SchedulerConfig
) -> Base:
    """Plays the load in virtual time; `new_tokens` of every request are committed. Tokens/s are the
    mean of the plays; tokens are those of all of them."""
    plays = [_play(load, spec, speed, replicas, config, seed) for seed in range(PLAYS)]
    assert all(play.tokens == plays[0].tokens for play in plays), "luck has changed a token"
    return Base(
        fmean(play.tokens_per_s for play in plays),
        tuple(seconds for play in plays for seconds in play.latencies_s),
        plays[0].tokens,
    )


def _play(
    load: Load, spec: ReplicaSpec, speed: Speed, replicas: int, config: SchedulerConfig, seed: int
) -> Base:
    requests = [
        Request(str(number), tuple(prompt), load.new_tokens)
        for number, prompt in enumerate(load.prompts)
    ]
    coming = iter(requests)

    def come_back(now_s: float, _event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Finish) and (request := next(coming, None)) is not None:
                world.submit(now_s, request, speed.acceptance)

    world = World(
        Random(seed),
        speed.times,
        config,
        faults=FaultPlan(delay_s=(0.0, 0.0)),
        watch=come_back,
    )
    for number in range(replicas):
        world.join(0.0, f"r{number}", spec)
    for request in (next(coming) for _ in range(min(load.in_flight, len(requests)))):
        world.submit(0.0, request, speed.acceptance)
    by_id = world.run().outcomes
    outcomes = [by_id[request.id] for request in requests]
    assert all(isinstance(outcome.end, Finish) for outcome in outcomes), "a request was not served"
    tokens = sum(len(outcome.tokens) for outcome in outcomes)
    ends_s = [outcome.finished_s or 0.0 for outcome in outcomes]
    spent_s = tuple(
        end_s - outcome.submitted_s for end_s, outcome in zip(ends_s, outcomes, strict=True)
    )
    return Base(tokens / max(ends_s), spent_s, [outcome.tokens for outcome in outcomes])
