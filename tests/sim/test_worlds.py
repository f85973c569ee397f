"""Proves that in random worlds every request finishes exactly once, with the right tokens.

After every event all invariants of the books hold and nobody has waited beyond the bound; at the
end no sequence and no block is left over. Hypothesis prints the seed and the knobs of a world that
fails; `build(seed, knobs)` replays it.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.messages import FinishReason
from tests.sim.worlds import LONGEST_S, Knobs, build, check

seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=200, deadline=None)
@given(
    seeds,
    st.builds(
        Knobs,
        requests=st.integers(1, 40),
        replicas=st.integers(1, 4),
        rows_max=st.sampled_from([1, 2, 3, 8]),
        batches_in_flight_max=st.integers(1, 4),
        passes_max=st.integers(1, 4),
        wait_rounds=st.integers(1, 5),
        steps_per_batch_max=st.sampled_from([1, 4]),
        residents_max=st.sampled_from([1, 5, 64]),
        waiting_requests_max=st.sampled_from([3, 4096]),
        trouble=st.booleans(),
        deaths=st.integers(0, 4),
        drains=st.integers(0, 2),
        cancels=st.integers(0, 6),
        deadly=st.sampled_from([0, 0, 1, 2]),
        kv_reserve=st.sampled_from([0.0, 0.5, 1.0]),
        pinned=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        spread_max=st.sampled_from([None, None, None, 0, 10]),
    ),
)
def test_every_request_finishes_exactly_once_with_the_right_tokens(seed: int, knobs: Knobs) -> None:
    world, requests = build(seed, knobs)
    check(world, requests, world.run(LONGEST_S), knobs)


@settings(max_examples=15, deadline=None)
@given(seeds)
def test_without_trouble_every_request_is_complete(seed: int) -> None:
    knobs = Knobs(trouble=False, deaths=0, drains=0, cancels=0)
    world, requests = build(seed, knobs)
    report = world.run(LONGEST_S)
    check(world, requests, report, knobs)
    recovered = 0
    for request in requests:
        outcome = report.outcomes[request.id]
        if outcome.finish is None:
            assert outcome.reject is not None
            continue
        recovered += outcome.finish.usage.recovered
        if request.timeout_s is None:
            assert outcome.finish.reason in ("stop", "length")
    status = world.scheduler.snapshot()
    assert recovered == status.preempted + status.moved == status.recovered


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_the_same_seed_gives_the_same_world(seed: int) -> None:
    first, _ = build(seed, Knobs())
    second, _ = build(seed, Knobs())
    assert first.run(LONGEST_S) == second.run(LONGEST_S)
    assert first.scheduler.snapshot() == second.scheduler.snapshot()


def test_a_crowded_world_keeps_the_waiting_bound_and_uses_its_replicas() -> None:
    knobs = Knobs(requests=300, replicas=2, residents_max=64, trouble=False, deaths=0, drains=0)
    world, requests = build(4, knobs)
    check(world, requests, world.run(LONGEST_S), knobs)
    assert world.report.group_batches > 100, "it is not crowded"
    assert world.report.utilisation > 0.5


def test_blocks_that_run_out_send_sequences_back_and_nothing_is_lost() -> None:
    """Without it the other worlds could all be too roomy to prove anything about blocks."""
    knobs = Knobs(requests=60, trouble=False, deaths=0, drains=0, kv_reserve=0.0)
    preempted = 0
    for seed in range(20):
        world, requests = build(seed, knobs)
        check(world, requests, world.run(LONGEST_S), knobs)
        preempted += world.scheduler.snapshot().preempted
    assert preempted > 20


def test_deadly_requests_kill_three_replicas_at_most_and_fail_alone() -> None:
    knobs = Knobs(requests=40, trouble=False, deaths=0, drains=0, cancels=0, deadly=1)
    failed = 0
    for seed in range(20):
        world, requests = build(seed, knobs)
        report = world.run(LONGEST_S)
        check(world, requests, report, knobs)
        finish = report.outcomes["q0"].finish
        failed += finish is not None and finish.reason is FinishReason.FAILED
    assert failed > 10, "the deadly request hardly ever ran"
