"""Proves: a batch is cut where two steps take less time than one; what is cut steps in turns, waits
no longer than grouping promises, and comes together again."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from scheduler.batching.grouping import part_of
from scheduler.config import SchedulerConfig
from scheduler.draft_length import DraftPolicy
from scheduler.messages import (
    Batch,
    BatchKind,
    ReplicaSpec,
    Request,
    StepResult,
    StepRow,
    StepTimes,
    StepTiming,
)
from scheduler.state.sequence import Sequence
from tests.scheduler.hand import Hand

LENGTHS = st.lists(st.integers(1, 1000), min_size=1, max_size=16).map(sorted)


def parts(lengths: list[int], apart: float) -> list[tuple[int, int]]:
    return sorted({part_of(lengths, at, apart) for at in range(len(lengths))})


def read(lengths: list[int]) -> int:
    return len(lengths) * max(lengths)


@given(LENGTHS, st.integers(0, 5000))
def test_a_batch_is_whole_or_cut_once_where_that_saves_most(lengths: list[int], apart: int) -> None:
    found = parts(lengths, apart)
    assert len(found) <= 2
    assert found[0][0] == 0
    assert found[-1][1] == len(lengths)
    assert all(one[1] == two[0] for one, two in pairwise(found))
    whole = read(lengths)
    cuts = [read(lengths[:at]) + read(lengths[at:]) for at in range(1, len(lengths))]
    least = min(cuts, default=whole)
    spent = sum(read(lengths[begin:end]) for begin, end in found)
    assert spent == (least if whole - least > apart else whole)


@given(LENGTHS)
def test_where_reading_takes_no_time_nothing_is_cut(lengths: list[int]) -> None:
    assert parts(lengths, math.inf) == [(0, len(lengths))]


def timings(apart: float) -> tuple[StepTiming, ...]:
    """A step costs 10 ms beside its tokens: as much as reading `apart` positions."""
    return tuple(
        StepTiming(rows, 0, kv, 0.0, 10e-3 * (1 + kv / apart) + 3e-4 * rows, 0.0)
        for rows in (1, 4, 8)
        for kv in (1000, 100_000)
    )


@pytest.mark.parametrize("round_trip_s", [0.0, 5e-3])
def test_a_step_is_worth_the_positions_that_are_read_in_its_time(round_trip_s: float) -> None:
    policy = DraftPolicy(SchedulerConfig(draft_len=0))
    policy.joined("r", ReplicaSpec(1000, 16, 10_000, 100, timings=timings(apart=1e5)))
    rows = [Sequence(Request(str(n), (1,) * 100, 50), n) for n in range(8)]
    assert policy.apart("r") == math.inf, "nothing has stepped"
    policy.plan("r", rows, 1)
    batch = Batch(
        1, "r", BatchKind.SPECULATE, rows=tuple(StepRow(one.id, 100, 0, 99) for one in rows)
    )
    took_s = 10e-3 + 8 * 3e-4 + 800e-7
    times = StepTimes(verify_s=took_s, total_s=took_s)
    policy.observe(batch, StepResult(1, "r", (), 1, times), [], round_trip_s)
    assert policy.apart("r") == pytest.approx((10e-3 + round_trip_s) / 1e-7, rel=0.05)


def far_apart(**spec: object) -> Hand:
    """Three rows of about 10 tokens and three of about 200, all ready."""
    hand = Hand(draft_len=0, rows_max=8, steps_per_batch_max=1)
    hand.join(kv_blocks=100_000, **spec)
    for number, length in enumerate((10, 200, 11, 210, 12, 220)):
        hand.submit(str(number), length, max_new_tokens=250)
    hand.settle()
    return hand


def stepped(hand: Hand, batches: int) -> list[list[int]]:
    """Lengths of the rows of the next batches, each answered when there is no room for more."""
    seen: dict[int, Batch] = {}
    while len(seen) < batches and hand.in_flight():
        for batch in hand.in_flight():
            if batch.kind is BatchKind.SPECULATE:
                seen[batch.id] = batch
        hand.done(hand.in_flight()[0])
    return [[row.length for row in batch.rows] for batch in seen.values()]


def test_far_rows_step_in_turns() -> None:
    hand = far_apart(timings=timings(apart=300))
    stepped(hand, 4)
    for lengths in stepped(hand, 20):
        assert len(lengths) == 3
        assert lengths[-1] - lengths[0] < 50


@pytest.mark.parametrize(
    "spec",
    [{}, {"timings": timings(apart=1200)}, {"timings": timings(apart=300), "reads_apart": True}],
)
def test_rows_that_are_worth_it_step_together(spec: dict[str, object]) -> None:
    """Without times, where a step is worth more than the positions that a cut would save, or where
    each row reads only as far as it goes."""
    hand = far_apart(**spec)
    stepped(hand, 4)
    assert all(len(lengths) == 6 for lengths in stepped(hand, 10))


def test_parts_come_together_when_their_lengths_do() -> None:
    """The long ones end, the short ones go on, and others come that are as short."""
    hand = far_apart(timings=timings(apart=300))
    stepped(hand, 4)
    for number in (1, 3, 5):
        hand.cancel(str(number))
    for number in range(3):
        hand.submit(f"new {number}", 12, max_new_tokens=250)
    hand.settle()
    stepped(hand, 4)
    assert all(len(lengths) == 6 for lengths in stepped(hand, 10))
