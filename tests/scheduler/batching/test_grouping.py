"""Proves that a batch is a tight window of the ready rows, and how long a row can wait.

The bound: never passed over more than wait_rounds * G - 1 times in a row.
"""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from scheduler.batching.grouping import batches_per_round, choose_rows, may_step, passes_bound
from scheduler.messages import Request
from scheduler.state import ReadyRows, Sequence


def ready_rows(lengths: list[int], new: int | None = None) -> ReadyRows:
    """Rows "0", "1", ... became ready in this order; the `new` one has committed nothing yet."""
    rows = ReadyRows()
    for index, length in enumerate(lengths):
        committed = [] if index == new else [1]
        prompt = (1,) * (length - len(committed))
        rows.add(Sequence(Request(str(index), prompt, 1000), index, committed=committed))
    return rows


def take(rows: ReadyRows, rows_max: int, per_round: int, wait_rounds: int) -> list[Sequence]:
    """The next batch, dispatched."""
    chosen = choose_rows(rows, rows_max, per_round, wait_rounds)
    rows.take(chosen, max(len(rows), per_round * rows_max))
    return chosen


def names(rows: list[Sequence]) -> list[str]:
    return [row.id for row in rows]


def spread(lengths: list[int]) -> int:
    return max(lengths) - min(lengths)


lengths_of_rows = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(lengths_of_rows, st.integers(1, 12))
def test_while_no_row_is_behind_the_shortest_go_first(lengths: list[int], rows_max: int) -> None:
    rows = ready_rows(lengths)
    taken = take(rows, rows_max, 1, wait_rounds=100)
    rows.check_integrity()
    assert [row.length for row in taken] == sorted(lengths)[:rows_max]
    assert set(taken).isdisjoint(rows)


def test_those_behind_in_length_catch_up_and_then_go_on_with_the_next() -> None:
    rows = ready_rows([10] * 4 + [16] * 4)
    for _ in range(3):
        taken = take(rows, 4, 2, wait_rounds=9)
        assert sorted(names(taken)) == ["0", "1", "2", "3"]
        for row in taken:
            row.length += 2
            rows.add(row)
    assert [row.length for row in rows] == [16] * 8


@pytest.mark.parametrize(("wait_rounds", "batches"), [(2, 2), (100, 4)])
def test_a_row_that_is_behind_anchors_the_next_window(wait_rounds: int, batches: int) -> None:
    """Passed over for a round of two batches; or with two steps less than its share."""
    rows = ready_rows([100, 10, 10, 90])
    for _ in range(batches):
        taken = take(rows, 2, 2, wait_rounds)
        assert sorted(names(taken)) == ["1", "2"]
        for row in taken:
            rows.add(row)
    assert names(take(rows, 2, 2, wait_rounds)) == ["3", "0"], "its nearest neighbour comes along"


def test_where_others_are_due_those_nearest_to_the_oldest_fill_what_is_left() -> None:
    """Of its window, the three of 45 to 52, the one of 52."""
    rows = ready_rows([50, 200, 10, 10, 10])
    for _ in range(2):
        for row in take(rows, 3, 2, wait_rounds=2):
            rows.add(row)
    for index, length in enumerate((45, 52, 60)):
        rows.add(Sequence(Request(f"near{length}", (1,) * length, 9), 9 + index, committed=[1]))
    assert names(take(rows, 3, 2, wait_rounds=2)) == ["0", "near52", "1"]


def test_with_one_round_rows_go_in_order_of_arrival() -> None:
    rows = ready_rows([90, 10, 50, 11, 51, 91])
    taken = [sorted(names(take(rows, 2, 3, wait_rounds=1))) for _ in range(3)]
    assert taken == [["0", "1"], ["2", "3"], ["4", "5"]]


def test_a_row_that_waits_for_a_first_token_anchors_the_next_window() -> None:
    rows = ready_rows([10, 10, 11, 80, 90, 91], new=3)
    assert names(take(rows, 2, 3, 4)) == ["3", "4"]
    rows.check_integrity()
    assert names(take(rows, 2, 3, 4)) == ["0", "1"], (
        "once it has gone, the short ones go first again"
    )


@settings(max_examples=100, deadline=None)
@given(lengths_of_rows, st.integers(1, 12))
def test_an_anchored_window_is_the_tightest_with_the_anchor(
    lengths: list[int], rows_max: int
) -> None:
    rows = ready_rows(lengths, new=0)
    taken = take(rows, rows_max, 2, wait_rounds=2)
    others = sorted(lengths)
    others.remove(lengths[0])
    windows = [
        [lengths[0], *others[begin : begin + len(taken) - 1]]
        for begin in range(len(others) - len(taken) + 2)
    ]
    assert "0" in names(taken)
    assert spread([row.length for row in taken]) <= min(map(spread, windows))


@pytest.mark.parametrize("before", [0, 1, 2])
def test_of_windows_that_are_as_tight_the_longest_rows_go(before: int) -> None:
    lengths = [10 - 2 * at for at in range(1, before + 1)]
    rows = ready_rows([10, *lengths, 12, 14], new=0)
    assert sorted(row.length for row in take(rows, 3, 2, wait_rounds=2)) == [10, 12, 14]


def _growth(name: str, rng: Random) -> int:
    if name == "random":
        return rng.choice([0, 0, 1])
    return 0 if name == "still" else 1


@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["random", "still", "chasing"]),
    st.integers(0, 2**32),
)
def test_no_row_waits_beyond_the_bound(
    count: int, rows_max: int, wait_rounds: int, in_flight: int, way: str, seed: int
) -> None:
    """A search for a counter-example: rows of hostile lengths step, grow and come back while
    others are in flight. Growing by nothing keeps the most attractive rows attractive for ever;
    `chasing` rows stand beside the oldest, so that no other goes with it."""
    rng = Random(seed)
    rows = ready_rows(
        [rng.choice([1, 5, 9, 100 * i + 1, rng.randint(1, 200)]) for i in range(count)]
    )
    per_round = batches_per_round(count, rows_max)
    bound = passes_bound(count, rows_max, wait_rounds)
    batches: list[list[Sequence]] = []
    for _ in range(150):
        if len(batches) >= in_flight or not rows:
            oldest = next(iter(rows), None)
            for row in batches.pop(0):
                row.length += _growth(way, rng)
                if way == "chasing" and oldest is not None and row.number % 2:
                    row.length = oldest.length + 1
                if rng.random() < 0.1:  # as one without a token
                    row.committed, row.turn = [], -inf
                rows.add(row)
        batches.append(take(rows, rows_max, per_round, wait_rounds))
        assert all(rows.times_passed_over(row) <= bound for row in rows)
    rows.check_integrity()


@pytest.mark.parametrize(
    ("ready", "stepping", "joining", "expected"),
    [
        (1, 0, 0, True),  # a replica without any batch never waits
        (4, 4, 0, False),  # a fragment waits: all 8 belong in one batch
        (7, 1, 0, False),
        (8, 8, 0, True),  # two full batches alternate
        (9, 8, 0, True),
        (4, 8, 0, True),  # 12 rows take turns, 8 and 4
        (3, 8, 0, False),
        (7, 0, 1, True),  # behind a prefill: most of the batch is there
        (3, 0, 5, False),  # most of the batch is being filled
        (3, 0, 3, True),
        (4, 0, 40, True),
    ],
)
def test_a_second_batch_is_worth_its_place_or_waits(
    ready: int, stepping: int, joining: int, expected: bool
) -> None:
    for short_gap in (False, True):
        # Where the gap behind a prefill is short, rows wait for those that it fills.
        waits = short_gap and joining > 0 and not stepping
        asked = (ready, stepping, joining)
        assert may_step(*asked, rows_max=8, short_gap=short_gap) is (expected and not waits)
