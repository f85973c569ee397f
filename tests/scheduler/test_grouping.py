"""Proves that a group is a tight window of the ready rows, and how long a row can wait.

The bound: never passed over more than wait_rounds * G - 1 times in a row.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.grouping import (
    ReadyRows,
    group_size,
    groups_needed,
    may_step,
    passes_bound,
)
from scheduler.shelf import LEVEL


def ready_rows(lengths: list[int]) -> ReadyRows:
    """Rows "0", "1", ... became ready in this order."""
    rows = ReadyRows()
    for index, length in enumerate(lengths):
        rows.add(str(index), length)
    return rows


def test_rows_that_come_together_stand_as_if_they_had_come_one_by_one() -> None:
    came = [("a", 7, 0), ("b", 5, 1), ("c", 7, 0), ("d", 2, 0), ("e", 5, 1)]
    together: ReadyRows = ReadyRows()
    one_by_one: ReadyRows = ReadyRows()
    for row, length, kind in came:
        one_by_one.add(row, length, kind)
    together.add_all(came)
    together.check_integrity()
    assert list(together) == list(one_by_one)
    assert together.lengths() == one_by_one.lengths()
    while one_by_one:
        assert take(together, 2, 2, 3, 3) == take(one_by_one, 2, 2, 3, 3)
    assert not together


def take(rows: ReadyRows, *args: int, **kwargs: int) -> list[str]:
    """The next group, dispatched."""
    chosen = rows.choose(*args, **kwargs)
    rows.take(chosen, len(rows))
    return chosen


def spread(lengths: list[int]) -> int:
    return max(lengths) - min(lengths)


lengths_of_rows = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(lengths_of_rows, st.integers(1, 12))
def test_the_shortest_tight_window_goes_first_or_else_the_tightest(
    lengths: list[int], size: int
) -> None:
    rows = ready_rows(lengths)
    taken = take(rows, size, size, 1, wait_rounds=100)
    rows.check_integrity()
    assert len(taken) == min(size, len(lengths))
    rising = sorted(lengths)
    windows = [rising[i : i + len(taken)] for i in range(len(rising) - len(taken) + 1)]
    chosen = [lengths[int(row)] for row in taken]
    assert chosen == sorted(chosen), "rows do not rise by length"
    tight = LEVEL * spread(lengths) * len(taken) / len(lengths)
    enough = [window for window in windows if spread(window) <= tight]
    if enough:
        assert chosen == enough[0]
    else:
        assert spread(chosen) == min(map(spread, windows))


def test_those_behind_catch_up_and_then_go_on_with_the_next() -> None:
    """Two clusters of one size: the shorter one steps until it has met the longer one."""
    rows = ready_rows([10] * 4 + [16] * 4)
    length = 10
    for _ in range(3):
        taken = take(rows, 4, 4, 2, wait_rounds=9)
        assert sorted(taken) == ["0", "1", "2", "3"]
        length += 2
        for row in taken:
            rows.add(row, length)
    assert rows.lengths() == [16] * 8


def test_a_uniform_group_is_found_among_mixed_lengths() -> None:
    rows = ready_rows([10, 31, 20, 32, 20, 33, 20, 11])
    assert sorted(take(rows, 3, 3, 3, wait_rounds=4)) == ["2", "4", "6"]


def test_of_equally_tight_windows_the_one_with_the_oldest_row_goes_first() -> None:
    # No window is tight here: lengths lie evenly.
    assert take(ready_rows([50, 40, 10, 20, 30, 60]), 2, 2, 3, 4) == ["1", "0"]
    assert take(ready_rows([30, 50, 10, 20, 40]), 2, 2, 3, 4) == ["3", "0"]
    assert take(ready_rows([7] * 6), 3, 3, 2, 4) == ["0", "1", "2"]


def test_a_row_passed_over_too_often_anchors_the_next_window() -> None:
    rows = ready_rows([100, 10, 10, 90])
    # (4 - 1.5) rounds of 2 groups.
    for _ in range(5):
        assert sorted(take(rows, 2, 2, 2, wait_rounds=4), key=int) == ["1", "2"]
        rows.add("1", 10)
        rows.add("2", 10)
    assert take(rows, 2, 2, 2, wait_rounds=4) == ["3", "0"], "its nearest neighbour comes along"


def test_with_one_round_rows_go_in_order_of_arrival() -> None:
    rows = ready_rows([90, 10, 50, 11, 51, 91])
    assert [sorted(take(rows, 2, 2, 3, wait_rounds=1)) for _ in range(3)] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
    ]


def test_rows_of_one_kind_step_together_where_there_are_enough() -> None:
    rows = ReadyRows()
    for index, length in enumerate([10, 10, 11, 11, 12, 12]):
        rows.add(str(index), length, kind=index % 2)
    assert sorted(take(rows, 3, 3, 2, 4)) == ["0", "2", "4"], "the kind of the oldest row"
    rows.check_integrity()
    assert sorted(take(rows, 3, 3, 2, 4)) == ["1", "3", "5"]


def test_the_other_kind_goes_first_where_it_alone_fills_a_group() -> None:
    rows = ReadyRows()
    for index, kind in enumerate([0, 1, 1, 1]):
        rows.add(str(index), 10 + index, kind)
    assert sorted(take(rows, 3, 3, 2, 4)) == ["1", "2", "3"]
    assert take(rows, 3, 3, 2, 4) == ["0"]


def test_kinds_mix_where_neither_fills_a_group() -> None:
    rows = ReadyRows()
    for index, length in enumerate([30, 10, 20, 40]):
        rows.add(str(index), length, kind=index % 2)
    taken = take(rows, 3, 3, 2, 4)
    assert taken == ["1", "2", "0"], "by rising length"
    rows.check_integrity()


def test_whoever_waits_for_a_first_token_anchors_the_next_window() -> None:
    rows = ReadyRows()
    for index, length in enumerate([10, 10, 11, 80, 90, 91]):
        rows.add(str(index), length, new=index == 3)
    assert take(rows, 2, 2, 3, 4) == ["3", "4"]
    rows.check_integrity()
    assert take(rows, 2, 2, 3, 4) == ["0", "1"], "once it has gone, the short ones go first again"


@settings(max_examples=100, deadline=None)
@given(lengths_of_rows, st.integers(1, 12), st.data())
def test_an_anchored_window_is_the_tightest_with_the_anchor(
    lengths: list[int], size: int, data: st.DataObject
) -> None:
    rows = ready_rows(lengths)
    # Overdue by half a round of two groups: one pass.
    rows.batches += 1
    taken = take(rows, size, size, 2, wait_rounds=2)
    others = sorted(lengths)
    others.remove(lengths[0])
    windows = [
        sorted([lengths[0], *others[i : i + len(taken) - 1]])
        for i in range(len(others) - len(taken) + 2)
    ]
    assert "0" in taken
    chosen = [lengths[int(row)] for row in taken]
    assert spread(chosen) <= min(spread(window) for window in windows)


@settings(max_examples=120, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_no_row_waits_beyond_the_bound(rows_count, rows_max, wait_rounds, in_flight, rng) -> None:
    """Rows of hostile lengths step, grow and come back; batches in flight answer in turn."""
    lengths = {str(i): rng.choice([1, 5, 9, rng.randint(1, 200)]) for i in range(rows_count)}
    rows = ready_rows(list(lengths.values()))
    groups = groups_needed(rows_count, rows_max)
    size, _ = group_size(rows_count, rows_max, halves=rng.random() < 0.5)
    bound = passes_bound(rows_count, rows_max, wait_rounds)
    batches: list[list[str]] = []
    for _ in range(150):
        if len(batches) >= in_flight or not len(rows):
            for row in batches.pop(0):
                # Growing by nothing keeps the most attractive rows attractive for ever.
                lengths[row] += rng.choice([0, 0, 1])
                rows.add(row, lengths[row], rng.choice([0, 0, 0, 1]), new=rng.random() < 0.1)
        batches.append(take(rows, size, rows_max, groups, wait_rounds))
        assert all(rows.passes(row) <= bound for row in rows)


def test_the_bound_holds_when_all_rows_are_overdue_at_once() -> None:
    """Far apart and with always the same close companions, each batch serves one old row only."""
    rows_max, wait_rounds, count = 4, 2, 40
    lengths = {str(i): 100 * i for i in range(count)}
    companions = {f"c{i}": 0 for i in range(rows_max - 1)}
    rows = ReadyRows()
    for row, length in (lengths | companions).items():
        rows.add(row, length)
    bound = passes_bound(count + len(companions), rows_max, wait_rounds)
    worst = 0
    for _ in range(3 * bound):
        oldest = next(iter(rows))
        taken = take(
            rows, rows_max, rows_max, groups_needed(count + len(companions), rows_max), wait_rounds
        )
        for row in taken:
            # The companions follow the oldest row around, so that nobody else goes with it.
            length = lengths.get(row, lengths.get(oldest, 0) + 100)
            rows.add(row, length)
        worst = max(worst, *(rows.passes(row) for row in rows))
    assert worst <= bound


@pytest.mark.parametrize(
    ("rows", "halves", "groups", "size"),
    [
        (0, False, 0, (0, 0)),
        (1, True, 1, (1, 1)),
        (8, True, 1, (8, 8)),
        (9, True, 2, (5, 4)),
        (12, True, 2, (6, 6)),
        (9, False, 2, (8, 8)),  # one runs, one waits
        (15, False, 2, (8, 8)),
        (16, True, 2, (8, 8)),  # two full groups need no halves
        (17, True, 3, (8, 8)),
    ],
)
def test_groups_are_full_or_halves_that_take_turns(
    rows: int, halves: bool, groups: int, size: tuple[int, int]
) -> None:
    assert (groups_needed(rows, 8), group_size(rows, 8, halves)) == (groups, size)


@pytest.mark.parametrize(
    ("ready", "stepping", "joining", "batches", "halves", "expected"),
    [
        (0, 8, 0, 1, False, False),  # nobody to step
        (1, 0, 0, 0, False, True),  # a replica without any batch never waits
        (4, 4, 0, 1, False, False),  # a fragment waits: all 8 belong in one group
        (7, 1, 0, 1, False, False),
        (8, 8, 0, 1, False, True),  # two whole groups alternate
        (9, 8, 0, 1, False, True),
        (4, 5, 0, 1, True, True),  # 9 rows as halves of 5 and 4
        (3, 6, 0, 1, True, False),
        (4, 8, 0, 1, False, False),  # 12 rows as full groups: 4 wait
        (7, 0, 1, 1, False, True),  # behind a prefill: most of the group is there
        (1, 0, 6, 1, False, False),  # most of the group is being filled
        (4, 0, 40, 1, False, True),
    ],
)
def test_a_second_batch_is_a_whole_group_or_waits(
    ready: int, stepping: int, joining: int, batches: int, halves: bool, expected: bool
) -> None:
    _, beside = group_size(ready + stepping, 8, halves)
    assert may_step(ready, stepping, joining, batches, beside, rows_max=8) is expected
