"""Proves that a request's pins hold in every batch, narrow them and never widen, and that whoever
pins, and whoever steps beside it, waits no longer than the bound, in which narrow rows count as
groups.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.admission import check_request
from scheduler.batches import batch_spread
from scheduler.config import SchedulerConfig
from scheduler.errors import InvalidRequest
from scheduler.grouping import ReadyRows, groups_needed, passes_bound
from scheduler.messages import Batch, BatchKind, Pins, Request
from scheduler.narrowing import Group, Limits, groups_by_length, limits_of, narrow_groups
from tests.scheduler.hand import Hand, rows_of


def play(hand: Hand, batches: int) -> list[Batch]:
    """Answers the oldest batch again and again; all batches of steps that were."""
    steps = []
    for _ in range(batches):
        batch = hand.in_flight()[0]
        if batch.kind is BatchKind.SPECULATE:
            steps.append(batch)
        hand.done(batch)
    return steps


# --------------------------------------------------------------------------- rows of a batch


def test_one_that_pins_one_row_steps_alone_and_the_others_together() -> None:
    hand = Hand(rows_max=4)
    hand.join()
    hand.submit("alone", pins=Pins(rows_max=1))
    for row in "abcd":
        hand.submit(row)
    batches = [sorted(rows_of(batch)) for batch in play(hand, 40)[-20:]]
    assert batches.count(["alone"]) == batches.count(["a", "b", "c", "d"]) == 10
    assert len(hand.in_flight()) == 2, "nothing is prepared beside the running batch"


def test_a_pinned_spread_keeps_those_away_that_are_too_far() -> None:
    hand = Hand(rows_max=8)
    hand.join()
    hand.submit("near", length=20, pins=Pins(spread_max=8))
    hand.submit("a", length=24)
    hand.submit("b", length=100)
    hand.submit("c", length=101)
    steps = play(hand, 40)
    assert any(len(rows_of(batch)) == 2 and "near" in rows_of(batch) for batch in steps)
    for batch in steps:
        if "near" in rows_of(batch):
            assert batch_spread(batch) <= 8


def test_a_pin_that_changes_nothing_leaves_the_row_in_its_group() -> None:
    hand = Hand(rows_max=4)
    hand.join()
    hand.submit("a", pins=Pins(spread_max=1000))
    for row in "bcd":
        hand.submit(row, pins=Pins(rows_max=4))
    assert [sorted(rows_of(batch)) for batch in play(hand, 20)[-5:]] == [["a", "b", "c", "d"]] * 5


def test_who_pins_one_row_among_many_groups_has_one_batch_of_a_round() -> None:
    """Four full groups and one alone: a round is five batches."""
    hand = Hand(rows_max=4, prefill_rows_max=16)
    hand.join()
    hand.submit("alone", max_new_tokens=200, pins=Pins(rows_max=1))
    for row in range(16):
        hand.submit(f"r{row}", max_new_tokens=200)
    steps = [rows_of(batch) for batch in play(hand, 110)[-100:]]
    own = steps.count(["alone"])
    assert all(len(rows) == 4 for rows in steps if "alone" not in rows)
    assert own == 20


@pytest.mark.parametrize("others", [2, 3])
def test_narrow_rows_step_with_each_other_and_free_ones_in_full_groups(others: int) -> None:
    """Though a free row is always nearer. A round is two full groups and one for each narrow pair;
    a pair is of equal limits, or of limits that the narrower one's group obeys anyway."""
    hand = Hand(rows_max=4, prefill_rows_max=16)
    hand.join(kv_blocks=10_000)
    for row in range(8):
        hand.submit(f"free{row}", length=10 * row + 3, max_new_tokens=400)
    for row in range(4):
        pins = Pins(rows_max=others if row % 2 else 2)
        hand.submit(f"narrow{row}", length=20 * row + 4, max_new_tokens=400, pins=pins)
    steps = [rows_of(batch) for batch in play(hand, 76)[-60:]]
    small = [rows for rows in steps if any(row.startswith("narrow") for row in rows)]
    assert all(len(rows) == 4 for rows in steps if rows not in small)
    assert all(sum(row.startswith("narrow") for row in rows) == 2 for rows in small)
    assert len(small) == 30


@pytest.mark.parametrize("spread_max", [100, 1000])
def test_who_pins_a_spread_that_hardly_binds_has_a_place_in_every_round(spread_max: int) -> None:
    """Three groups of free rows and eight rows that are near enough to each other: four batches."""
    hand = Hand(rows_max=8, prefill_rows_max=32)
    hand.join(kv_blocks=10_000)
    for row in range(24):
        hand.submit(f"free{row}", length=3 + row, max_new_tokens=400)
    for row in range(8):
        pins = Pins(spread_max=spread_max)
        hand.submit(f"near{row}", length=3 + row, max_new_tokens=400, pins=pins)
    steps = [rows_of(batch) for batch in play(hand, 100)[-80:]]
    assert all(len(rows) == 8 for rows in steps)
    taken = Counter(row for rows in steps for row in rows)
    assert all(18 <= taken[f"near{row}"] <= 22 for row in range(8))
    # The others as rules 1 and 2 have it: some catch up, some wait for a while.
    assert all(taken[f"free{row}"] >= 8 for row in range(24))


def test_groups_by_length_are_as_few_as_the_limits_allow() -> None:
    near, pair = Limits(4, 10), Limits(2)
    rows = [(length, near) for length in (30, 5, 10, 15, 16, 40)]
    assert groups_by_length(rows, 8) == 3  # 5 to 15, 16, 30 to 40
    assert groups_by_length([(7, near)] * 5, 8) == 2
    assert groups_by_length([(7, near)] * 5, 2) == 3
    assert groups_by_length([*rows, (1, pair), (99, pair), (5, pair)], 8) == 5
    assert groups_by_length([], 8) == 0


def test_a_narrower_row_does_not_make_the_group_of_a_wider_one_small() -> None:
    ready = ReadyRows()
    ready.add("wide", 10, limits=Limits(4, 100))
    ready.add("pair", 10, limits=Limits(2))
    for row in range(3):
        ready.add(f"free{row}", 20 + row)
    assert ready.choose(4, 4, 3, 4) == ["wide", "free0", "free1", "free2"]


def test_the_configs_spread_holds_for_all() -> None:
    hand = Hand(rows_max=8, spread_max=10)
    hand.join()
    for index, length in enumerate((20, 25, 60, 65, 100)):
        hand.submit(f"r{index}", length=length)
    steps = play(hand, 40)
    assert all(batch_spread(batch) <= 10 for batch in steps)
    assert {len(batch.rows) for batch in steps[-6:]} == {1, 2}


@pytest.mark.parametrize(
    ("pins", "spread_max", "limits"),
    [
        (Pins(), None, None),
        (Pins(rows_max=8), None, None),
        (Pins(rows_max=100), None, None),
        (Pins(rows_max=7), None, Limits(7)),
        (Pins(spread_max=5), None, Limits(8, 5)),
        (Pins(spread_max=5), 3, Limits(8, 3)),
        (Pins(rows_max=1, spread_max=5), 9, Limits(1, 5)),
    ],
)
def test_the_narrower_of_request_and_config_holds(
    pins: Pins, spread_max: int | None, limits: Limits | None
) -> None:
    assert limits_of(pins, SchedulerConfig(rows_max=8, spread_max=spread_max)) == limits


def test_a_group_obeys_the_limits_of_all_its_rows() -> None:
    group = Group(4)
    assert group.add("a", 10, Limits(3))
    assert not group.fits(20, Limits(3, 9)), "too far from the first"
    assert group.add("b", 15, Limits(4, 6))
    assert not group.fits(17, None), "too far from the first, for the second"
    assert not group.fits(12, Limits(2)), "it would have three rows"
    assert group.add("c", 16, None)
    assert group.full


some_limits = st.sampled_from([None, None, None, Limits(1), Limits(2), Limits(8, 5), Limits(2, 0)])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), some_limits), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
def test_no_row_is_passed_over_beyond_the_bound(
    rows: list[tuple[int, Limits | None]], rows_max: int, wait_rounds: int, seed: int
) -> None:
    """Rows come back after a while, one group or several in flight, each longer than before."""
    rng = Random(seed)
    free = sum(limits is None for _, limits in rows)
    narrow = narrow_groups([limits for _, limits in rows if limits is not None], rows_max)
    groups = groups_needed(free, rows_max) + narrow
    bound = passes_bound(free, rows_max, wait_rounds, narrow)
    ready = ReadyRows()
    lengths = {str(index): length for index, (length, _) in enumerate(rows)}
    limits = {str(index): limits for index, (_, limits) in enumerate(rows)}
    for row, length in lengths.items():
        ready.add(row, length, kind=rng.randint(0, 1), new=rng.random() < 0.2, limits=limits[row])
    in_flight: list[list[str]] = []
    for _ in range(120):
        if len(ready):
            size = min(rng.choice([free, rows_max]), rows_max)
            # However few batches a round is believed to take.
            turns = rng.randint(1, groups)
            chosen = ready.choose(size, rows_max, groups, wait_rounds, turns)
            of_chosen = [lengths[row] for row in chosen]
            assert of_chosen == sorted(of_chosen)
            for row in chosen:
                mine = limits[row] or Limits(rows_max)
                assert len(chosen) <= min(mine.rows_max, rows_max)
                assert of_chosen[-1] - of_chosen[0] <= mine.spread_max
            ready.take(chosen, len(ready))
            ready.check_integrity()
            in_flight.append(chosen)
            assert all(ready.passes(row) <= bound for row in ready)
        while len(in_flight) > rng.randint(0, 2):
            for row in in_flight.pop(0):
                lengths[row] += rng.randint(1, 5)
                kind = rng.randint(0, 1)
                ready.add(row, lengths[row], kind, limits=limits[row])


# --------------------------------------------------------------------------- the other pins


def test_steps_of_a_batch_are_the_least_that_a_row_has_pinned() -> None:
    hand = Hand(steps_per_batch_max=8)
    hand.join()
    hand.submit("a", pins=Pins(steps_per_batch_max=3))
    hand.submit("b", pins=Pins(steps_per_batch_max=100))
    assert {batch.steps for batch in play(hand, 8)[-3:]} == {3}
    hand.cancel("a")
    assert {batch.steps for batch in play(hand, 8)[-3:]} == {8}


def test_a_prompt_is_filled_in_chunks_of_what_its_request_has_pinned() -> None:
    hand = Hand(prefill_tokens_max=200)
    hand.join()
    hand.submit("pinned", length=151, pins=Pins(prefill_tokens_max=40))
    hand.submit("other", length=101)
    chunks: dict[str, list[tuple[int, int | None]]] = {"pinned": [], "other": []}
    while hand.in_flight()[0].kind is BatchKind.PREFILL or chunks["pinned"][-1][1] != 150:
        batch = hand.in_flight()[0]
        for row in batch.prefill:
            chunks[row.sequence_id].append((row.begin, row.until))
        hand.done(batch)
    assert chunks["pinned"] == [(0, 40), (40, 80), (80, 120), (120, 150)]
    assert chunks["other"] == [(0, 100)], "it has what the other leaves"


def test_what_no_pin_can_be_is_refused_by_name() -> None:
    for pins, field in [
        (Pins(rows_max=0), "pins.rows_max"),
        (Pins(spread_max=-1), "pins.spread_max"),
        (Pins(steps_per_batch_max=0), "pins.steps_per_batch_max"),
        (Pins(prefill_tokens_max=31), "pins.prefill_tokens_max"),
    ]:
        with pytest.raises(InvalidRequest) as refused:
            check_request(Request("a", (1,), 1, pins=pins), SchedulerConfig())
        assert refused.value.field == field
    check_request(
        Request("a", (1,), 1, pins=Pins(1, 0, 1, 32, trim_drafts=False)), SchedulerConfig()
    )
