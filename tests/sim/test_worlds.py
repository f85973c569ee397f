"""Proves that in random worlds every request finishes exactly once, with the right tokens.

After every event all invariants of the books hold and no row has waited beyond the bound; at the
end no sequence and no block is left over. Hypothesis prints the number of a world that fails;
`run(*draw(SEED, number))` replays it.

`make worlds` runs thousands of others.
"""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from scheduler.messages import Finish, FinishReason, Request
from scheduler.simulation import Report, World
from tests.sim.worlds import LONGEST_S, Knobs, build, check, draw

SEED = 0
numbers = st.integers(0, 2**32 - 1)
QUIET = {"faults": False, "deaths": 0, "drains": 0}


def run(seed: int, knobs: Knobs) -> tuple[World, list[Request], Report]:
    world, requests = build(seed, knobs)
    report = world.run(LONGEST_S)
    check(world, requests, report, knobs)
    return world, requests, report


@given(numbers)
def test_every_request_finishes_exactly_once_with_the_right_tokens(number: int) -> None:
    run(*draw(SEED, number))


@settings(max_examples=15, deadline=None)
@given(numbers)
def test_without_faults_every_request_is_complete(seed: int) -> None:
    world, requests, report = run(seed, Knobs(cancels=0, **QUIET))
    recovered = 0
    for request in requests:
        finish = report.outcomes[request.id].end
        if not isinstance(finish, Finish):
            continue
        recovered += finish.usage.recovered
        if request.timeout_s is None:
            assert finish.reason in ("stop", "length")
    status = world.scheduler.snapshot()
    assert recovered == status.preempted + status.moved == status.recovered


@settings(max_examples=10, deadline=None)
@given(numbers)
def test_the_same_seed_gives_the_same_world(seed: int) -> None:
    first, again = (run(seed, Knobs()) for _ in range(2))
    assert first[2] == again[2]
    assert first[0].scheduler.snapshot() == again[0].scheduler.snapshot()


def test_a_crowded_world_keeps_the_waiting_bound_and_uses_its_replicas() -> None:
    world, _, report = run(4, Knobs(requests=150, replicas=2, residents_max=64, **QUIET))
    figures = world.scheduler.snapshot().figures
    assert figures.steps > 100, "it is not crowded"
    assert figures.busy_s > 0.5 * 2 * report.ended_s


def test_worlds_are_tight_and_deadly_enough_to_prove_something() -> None:
    """In them blocks run out, with layers of one kind and of two, and requests that kill replicas
    run; neither costs others a token."""
    for windows in (False, True):
        tight = Knobs(requests=60, kv_reserve=0.0, windows=windows, **QUIET)
        worlds = [run(seed, tight)[0] for seed in range(5)]
        assert sum(world.scheduler.snapshot().preempted for world in worlds) > 5
    deadly = Knobs(requests=40, cancels=0, deadly=1, **QUIET)
    ends = [run(seed, deadly)[2].outcomes["q0"].end for seed in range(6)]
    failed = [isinstance(end, Finish) and end.reason is FinishReason.FAILED for end in ends]
    assert sum(failed) > 3
