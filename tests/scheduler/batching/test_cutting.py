"""Proves: a group is cut where two steps take less time than one, by cost or by a pin; what is cut
steps in turns, waits no longer than grouping promises, and comes together again."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.batching.cutting import part_of
from scheduler.batching.grouping import passes_bound
from scheduler.config import SchedulerConfig
from scheduler.draft_length.cost_model import StepPrices
from scheduler.draft_length.estimates import LinearCost
from scheduler.messages import Batch, BatchKind
from tests.scheduler.hand import Hand

LENGTHS = st.lists(st.integers(1, 1000), min_size=1, max_size=16).map(sorted)


def parts(lengths: list[int], apart: float) -> list[tuple[int, int]]:
    return sorted({part_of(lengths, at, apart) for at in range(len(lengths))})


def read(lengths: list[int]) -> int:
    return len(lengths) * max(lengths)


@given(LENGTHS, st.integers(-1, 5000))
def test_every_row_is_in_one_part_and_no_cut_was_made_in_vain(
    lengths: list[int], apart: int
) -> None:
    found = parts(lengths, apart)
    assert found[0][0] == 0
    assert found[-1][1] == len(lengths)
    assert all(one[1] == two[0] for one, two in pairwise(found))
    spent = sum(read(lengths[begin:end]) for begin, end in found)
    assert spent + max(apart, 0) * (len(found) - 1) <= read(lengths)
    for begin, end in found:
        some = lengths[begin:end]
        for at in range(1, len(some)):
            assert read(some[:at]) + read(some[at:]) + max(apart, 0) >= read(some)


@given(LENGTHS)
def test_where_reading_takes_no_time_nothing_is_cut(lengths: list[int]) -> None:
    assert parts(lengths, math.inf) == [(0, len(lengths))]


def prices_of(
    rows: int, longest: int, draft: LinearCost, verify: LinearCost, rest: LinearCost
) -> StepPrices:
    return StepPrices(rows, longest, draft, verify, verify, rest, rest, {}, {})


@given(st.integers(0, 8), st.floats(0.0, 1e-2))
def test_a_step_is_worth_what_it_takes_whatever_it_does(draft_len: int, trip_s: float) -> None:
    costs = LinearCost(1e-3, 1e-5, 1e-8), LinearCost(1e-2, 3e-4, 1e-7), LinearCost(1e-4, 1e-6)
    prices = prices_of(8, 500, *costs)
    positions = prices.positions_of_a_step(draft_len, trip_s)
    one = prices_of(8, 500 + round(positions / 8), *costs)
    empty = prices_of(0, 0, *costs)
    more_s = prices(draft_len) + empty(draft_len) + trip_s
    assert one(draft_len) == pytest.approx(more_s, rel=1e-3)
    free = LinearCost(1e-2)
    assert prices_of(8, 9, free, free, free).positions_of_a_step(4, 0.0) == math.inf


def far_apart(apart: int | None, rows_max: int = 8, **settings: object) -> Hand:
    """Three rows of about 10 tokens and three of about 200, all ready."""
    hand = Hand(
        draft_len=0, rows_max=rows_max, steps_per_batch_max=1, apart_positions=apart, **settings
    )
    hand.join(kv_blocks=100_000)
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
    hand = far_apart(300)
    stepped(hand, 4)
    for lengths in stepped(hand, 20):
        assert len(lengths) == 3
        assert lengths[-1] - lengths[0] < 50
    hand.scheduler.check_integrity()


@pytest.mark.parametrize("apart", [None, 1200])
def test_rows_that_are_worth_it_step_together(apart: int | None) -> None:
    """Without times, or where a step is worth more than the positions that a cut would save."""
    hand = far_apart(apart)
    stepped(hand, 4)
    assert all(len(lengths) == 6 for lengths in stepped(hand, 10))


def test_parts_come_together_when_their_lengths_do() -> None:
    """The long ones end, the short ones go on, and others come that are as short."""
    hand = far_apart(300)
    stepped(hand, 4)
    for number in (1, 3, 5):
        hand.cancel(str(number))
    for number in range(3):
        hand.submit(f"new {number}", 12, max_new_tokens=250)
    hand.settle()
    stepped(hand, 4)
    assert all(len(lengths) == 6 for lengths in stepped(hand, 10))


@pytest.mark.parametrize("wait_rounds", [2, 3, 4])
@pytest.mark.parametrize("rows_max", [2, 4, 8])
def test_nobody_waits_longer_than_grouping_promises(rows_max: int, wait_rounds: int) -> None:
    """However far rows are apart: every one is a part of its own."""
    hand = Hand(draft_len=0, rows_max=rows_max, wait_rounds=wait_rounds, apart_positions=0)
    hand.join(kv_blocks=100_000)
    for number in range(11):
        hand.submit(str(number), 1 + number**2, max_new_tokens=40)
    replica = hand.scheduler._pool.replicas["r"]
    while hand.in_flight():
        hand.done(hand.in_flight()[0])
        for row in replica.ready:
            assert replica.ready.passes(row) <= passes_bound(11, rows_max, wait_rounds)
    assert len(hand.finishes) == 11


def test_a_replica_that_reads_apart_is_never_asked_for_two_steps() -> None:
    hand = Hand(draft_len=0, rows_max=8, steps_per_batch_max=1, apart_positions=0)
    hand.join(kv_blocks=100_000, reads_apart=True)
    for number, length in enumerate((10, 200, 11, 210)):
        hand.submit(str(number), length, max_new_tokens=100)
    hand.settle()
    stepped(hand, 4)
    assert all(len(lengths) == 4 for lengths in stepped(hand, 10))


def test_the_pin_is_checked() -> None:
    with pytest.raises(ValueError, match="apart_positions"):
        SchedulerConfig(apart_positions=-1)
