"""Proves that the number of replicas follows the load, is bounded, and does not flap.

The policy alone with drawn figures, and the meter with hand-made statuses. At work they are shown
in tests/integration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from scheduler.messages import ReplicaSpec
from scheduler.scaling import (
    AutoscalingConfig,
    CapacityMeter,
    ScalingState,
    unseen,
    wanted_replicas,
)
from scheduler.scaling.autoscaling import DOWN_SHARE, STARTING_MAX
from scheduler.state import BatchFigures
from scheduler.status import PoolStatus, ReplicaStatus

SPEC = ReplicaSpec(kv_blocks=2000, block_size=16, context_len=2048, vocab_size=50)


@dataclass(frozen=True)
class Load:
    """The figures of a status that the policy reads, and what one replica commits per second."""

    outstanding_tokens: int
    waiting: int
    tokens_per_s: float
    committed_per_s: float = 0.0

    def wanted(
        self,
        config: AutoscalingConfig,
        wanted: int,
        state: ScalingState,
        now_s: float,
        serving: int = 0,
    ) -> tuple[int, ScalingState]:
        status = PoolStatus(
            waiting=self.waiting,
            live=self.waiting,
            replicas=tuple(ReplicaStatus(str(n), SPEC) for n in range(serving)),
            finished={},
            outstanding_tokens=self.outstanding_tokens,
            tokens_per_s=self.committed_per_s,
        )
        return wanted_replicas(config, status, self.tokens_per_s, wanted, state, now_s)


times = st.floats(0.0, 1000.0)
past = st.one_of(st.none(), st.floats(-1000.0, 0.0))


@st.composite
def configs(draw: st.DrawFn) -> AutoscalingConfig:
    fewest = draw(st.integers(0, 5))
    return AutoscalingConfig(
        min_replicas=fewest,
        max_replicas=draw(st.integers(max(fewest, 1), 12)),
        drain_s=draw(st.floats(0.1, 100.0)),
        up_delay_s=draw(st.sampled_from([0.0, 2.0])),
        down_delay_s=draw(st.sampled_from([0.0, 5.0])),
        idle_s=draw(st.sampled_from([0.0, 20.0])),
        tokens_per_s=draw(st.floats(1.0, 1000.0)),
    )


loads = st.builds(
    Load,
    outstanding_tokens=st.integers(0, 10**6),
    waiting=st.integers(0, 1000),
    tokens_per_s=st.floats(1.0, 1e4),
    committed_per_s=st.floats(0.0, 1e5),
)
states = st.builds(ScalingState, high_since_s=past, low_since_s=past, live_s=past)


@given(configs(), loads, st.integers(-3, 20), states, times)
def test_the_number_is_within_the_bounds_and_no_live_request_without_a_replica(
    config: AutoscalingConfig, load: Load, wanted: int, state: ScalingState, now_s: float
) -> None:
    number, _ = load.wanted(config, wanted, state, now_s)
    least = max(config.min_replicas, 1 if load.waiting else 0)
    assert least <= number <= config.max_replicas


@given(configs(), loads, st.integers(0, 12), states, times)
def test_few_start_at_once(
    config: AutoscalingConfig, load: Load, wanted: int, state: ScalingState, now_s: float
) -> None:
    """However much there is to do: each of them loads a model. None serves in these statuses."""
    number, _ = load.wanted(config, wanted, state, now_s)
    assert number <= max(wanted, config.min_replicas, STARTING_MAX)


@given(configs(), loads, loads, st.integers(0, 12), states, times)
def test_more_load_never_wants_fewer_replicas(
    config: AutoscalingConfig,
    load: Load,
    more: Load,
    wanted: int,
    state: ScalingState,
    now_s: float,
) -> None:
    heavier = replace(
        load,
        outstanding_tokens=load.outstanding_tokens + more.outstanding_tokens,
        waiting=load.waiting + 1,
        committed_per_s=load.committed_per_s + more.committed_per_s,
    )
    number, _ = load.wanted(config, wanted, state, now_s)
    greater, _ = heavier.wanted(config, wanted, state, now_s)
    assert greater >= number


@given(configs(), loads, st.integers(0, 12), st.floats(0.05, 3.0))
def test_under_constant_load_the_number_moves_one_way_and_then_stands_still(
    config: AutoscalingConfig, load: Load, wanted: int, look_s: float
) -> None:
    state = ScalingState()
    numbers: list[int] = []
    for look in range(int(150 / look_s)):
        wanted, state = load.wanted(config, wanted, state, look * look_s)
        numbers.append(wanted)
    rises = any(b > a for a, b in pairwise(numbers))
    falls = any(b < a for a, b in pairwise(numbers))
    assert not (rises and falls), numbers
    settled = numbers[int(len(numbers) * 0.6) :]
    assert len(set(settled)) == 1, numbers


CONFIG = AutoscalingConfig(
    min_replicas=0,
    max_replicas=4,
    drain_s=10.0,
    up_delay_s=2.0,
    down_delay_s=30.0,
    idle_s=100.0,
    tokens_per_s=100.0,
)


def load_of(tokens: int, per_s: float = 0.0) -> Load:
    return Load(tokens, 1 if tokens else 0, tokens_per_s=100.0, committed_per_s=per_s)


CROWD, CALM, NONE = load_of(3500), load_of(500), load_of(0)


@pytest.mark.parametrize(
    ("wanted", "looks", "numbers"),
    [
        # The first request wants a replica at once, a crowd more after the delay.
        (0, [(0.0, CROWD), (1.9, CROWD), (2.0, CROWD)], [1, 1, 4]),
        # No more than four are on their way at once.
        (0, [(0.0, load_of(9000)), (2.0, load_of(9000))], [1, 4]),
        # A peak shorter than the delay adds nothing.
        (1, [(0.0, CROWD), (1.0, CROWD), (1.5, CALM), (2.5, CROWD), (4.4, CROWD)], [1] * 5),
        # Replicas go one by one, and the last one only when idle for long.
        (
            3,
            [(0.0, load_of(10)), *((float(t), NONE) for t in (1, 30, 31, 60, 61, 99, 100))],
            [3, 3, 2, 2, 1, 1, 1, 0],
        ),
        # Idle is the time since the last request, low what was never interrupted.
        (1, [(0.0, CALM), (60.0, CALM), (61.0, NONE), (159.0, NONE), (160.0, NONE)], [1] * 4 + [0]),
        (3, [(0.0, CALM), (20.0, load_of(2000)), (25.0, CALM), (54.0, CALM)], [3] * 4),
        (3, [(0.0, CALM), (20.0, CROWD), (21.0, CALM), (50.0, CALM), (51.0, CALM)], [3] * 4 + [2]),
        # Throughput holds those that a short queue would let go.
        (3, [(float(t), load_of(200, per_s=250.0)) for t in range(0, 200, 5)], [3] * 40),
    ],
)
def test_the_number_follows_the_load(
    wanted: int, looks: list[tuple[float, Load]], numbers: list[int]
) -> None:
    state, found = ScalingState(), []
    for now_s, load in looks:
        wanted, state = load.wanted(CONFIG, wanted, state, now_s)
        found.append(wanted)
    assert found == numbers


@pytest.mark.parametrize(("waiting", "outstanding"), [(1, 0), (0, 1)])
def test_one_request_is_enough_to_want_the_first_replica(waiting: int, outstanding: int) -> None:
    load = Load(outstanding, waiting, tokens_per_s=100.0)
    assert load.wanted(CONFIG, 0, ScalingState(), 7.0) == (1, ScalingState(live_s=7.0))


def test_so_many_start_at_once_as_serve_already() -> None:
    crowd = Load(10**6, 100, tokens_per_s=100.0, committed_per_s=0.0)
    config = AutoscalingConfig(max_replicas=256, up_delay_s=0.0)
    found = [crowd.wanted(config, 1, ScalingState(), 0.0, serving)[0] for serving in (0, 4, 64)]
    assert found == [4, 8, 128]


def test_a_quarter_of_many_replicas_goes_at_once_and_none_that_is_needed() -> None:
    config = AutoscalingConfig(max_replicas=256, down_delay_s=10.0)
    calm = Load(0, 0, tokens_per_s=100.0, committed_per_s=7000.0)
    wanted, state, found = 200, ScalingState(), []
    for look in range(6):
        wanted, state = calm.wanted(config, wanted, state, 10.0 * look)
        found.append(wanted)
    assert found == [200, 150, 113, 100, 100, 100]


@given(configs(), loads, st.integers(1, 12))
def test_a_load_that_lasts_gets_the_replicas_that_serve_it_in_time(
    config: AutoscalingConfig, load: Load, wanted: int
) -> None:
    """As many as commit what is outstanding in drain_s, within the bounds; and keeps those that
    commit what is committed, with some room."""
    state, now_s = ScalingState(), 0.0
    for _ in range(60):
        wanted, state = load.wanted(config, wanted, state, now_s)
        now_s += max(config.up_delay_s, config.down_delay_s, 1.0)
    queue = load.outstanding_tokens / config.drain_s / load.tokens_per_s
    work = load.committed_per_s / load.tokens_per_s
    reach = min(config.max_replicas, STARTING_MAX)  # of a status in which none serves
    assert wanted >= min(reach, math.ceil(queue))
    enough = math.ceil(max(queue, work) / DOWN_SHARE)
    assert wanted <= max(enough, config.min_replicas, 1)


def test_what_was_not_seen_has_not_lasted() -> None:
    state = ScalingState(high_since_s=1.0, low_since_s=2.0, live_s=3.0)
    assert unseen(state, 9.0) == ScalingState(high_since_s=1.0, low_since_s=None, live_s=9.0)


def test_a_server_that_begins_without_a_request_starts_no_replica() -> None:
    config = AutoscalingConfig(min_replicas=0, max_replicas=2)
    assert wanted_replicas(config, status(0), 100.0, 0, ScalingState(), 0.0)[0] == 0


# ------------------------------------------------------------------------- the meter


def status(waiting: int, *replicas: ReplicaStatus) -> PoolStatus:
    return PoolStatus(waiting, waiting, replicas, finished={})


def seen(name: str, busy_s: float, committed: int, steps: int, rows: int) -> ReplicaStatus:
    """A replica whose steps had `rows` rows each."""
    figures = BatchFigures(
        busy_s=busy_s, steps=steps, row_steps=steps * rows, committed_tokens=committed
    )
    return ReplicaStatus(name, SPEC, figures=figures)


Look = tuple[int, float, int, int, int]
"""Requests that wait; then the sums of the one replica: busy_s, committed tokens, steps, rows."""


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(0, 0.0, 0, 0, 0), (0, 0.5, 1000, 10, 8)], 300.0),  # too little: the default stands
        # However much time passes between two looks: only time in batches is divided by.
        ([(0, 0.0, 0, 0, 0), (0, 2.0, 200, 20, 8)], 100.0),
        # Batches that are not full raise the figure and never lower it.
        ([(0, 0.0, 0, 0, 0), (0, 2.0, 100, 20, 1)], 300.0),
        ([(0, 0.0, 0, 0, 0), (0, 2.0, 100, 20, 1), (0, 4.0, 1100, 40, 1)], 500.0),
        # Half of a full batch is enough work.
        ([(0, 0.0, 0, 0, 0), (0, 2.0, 200, 20, 4)], 100.0),
        ([(0, 0.0, 0, 0, 0), (0, 2.0, 200, 20, 3)], 300.0),
        # What was before this sample does not count.
        ([(0, 0.0, 0, 0, 0), (0, 2.0, 100, 20, 1), (0, 4.0, 300, 40, 4)], 100.0),
        ([(0, 0.0, 0, 0, 0), (0, 2.0, 600, 20, 8), (0, 4.0, 700, 40, 5)], 300.0),
        # Prefills alone commit nothing and say nothing of the speed.
        ([(1, 0.0, 0, 0, 0), (1, 2.0, 0, 0, 0)], 300.0),
        # Where requests wait a replica has enough to do, though its batches are small.
        ([(1, 0.0, 0, 0, 0), (1, 2.0, 100, 20, 2)], 50.0),
        # What looks in short order see adds up to a sample, and then the next one begins.
        ([(0, 0.4 * n, 80 * n, 4 * n, 8) for n in range(4)], 200.0),
        ([(0, 0.4 * n, 80 * n, 4 * n, 8) for n in range(3)], 300.0),
        # Requests must have waited at all its looks.
        ([(5, 0.0, 0, 0, 0), (0, 0.6, 30, 6, 2), (5, 1.2, 60, 12, 2)], 300.0),
        # A replica that is new or begins again is no sample.
        ([(0, 50.0, 10, 5, 8), (0, 1.0, 10, 5, 8)], 300.0),
    ],
)
def test_what_a_replica_commits_is_known_from_enough_work(
    looks: list[Look], expected: float
) -> None:
    meter = CapacityMeter(300.0, rows_max=8)
    assert meter.look(status(0)) == 300.0
    for waiting, *sums in looks:
        found = meter.look(status(waiting, seen("a", *sums)))
    assert found == pytest.approx(expected)


def test_the_figure_follows_what_is_measured_of_all_replicas() -> None:
    """Each shard is judged by its own queue."""
    meter = CapacityMeter(300.0, rows_max=8)
    for busy_s in (0, 2):
        busy = seen("a", busy_s, 500 * busy_s, 10 * busy_s, 8)
        idle = seen("b", busy_s, 50 * busy_s, 10 * busy_s, 1)
        meter.look(status(5, busy), status(0, idle))
    assert meter.tokens_per_s == 500.0
    for second in (0, 1):
        meter.look(status(0, seen("c", second, 1000 * second, second, 8)))
    assert 510 < meter.tokens_per_s < 600, "one second of it moves the figure a little"
    for second in range(400):
        replicas = (seen(name, second, 1000 * second, second, 8) for name in "cd")
        meter.look(status(0, *replicas))
    assert meter.tokens_per_s == pytest.approx(1000.0)
    for second in range(400, 800):  # the batches are small, but requests wait all the time
        committed = 400_000 + (second - 400) * 200
        meter.look(status(5, seen("c", second, committed, second, 2)))
    assert meter.tokens_per_s == pytest.approx(200.0, rel=0.05)
