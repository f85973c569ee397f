"""Proves that no row is behind an equal share of its replica's steps for long, wherever it lies."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.grouping import ReadyRows, groups_needed
from scheduler.lags import LAG_MAX, WATCHED, Lags


def test_equal_turns_put_nobody_behind() -> None:
    lags: Lags[str] = Lags()
    rows = list("abcdef")
    lags.become_ready(rows)
    for _ in range(10):
        for pair in ("ab", "cd", "ef"):
            lags.step(list(pair), of=6)
            lags.become_ready(pair)
            assert lags.due(rows) is None
    assert [lags.lag(row) for row in rows] == pytest.approx([0.0] * 6)
    lags.check_integrity(rows, rows)


def test_who_is_left_out_is_due_after_so_many_rounds() -> None:
    """Watched from when it comes back a round behind; until then its wait alone counts."""
    lags: Lags[str] = Lags()
    lags.become_ready("abz")
    while lags.lag("z") < WATCHED:
        lags.step(["a", "b"], of=3)
        lags.become_ready("ab")
    lags.step(["z"], of=3)
    assert lags.lag("z") < WATCHED
    while lags.lag("z") < WATCHED:
        lags.step(["a", "b"], of=3)
        lags.become_ready("ab")
    lags.become_ready("z")
    batches = 0
    while lags.due("abz") is None:
        assert lags.lag("z") < LAG_MAX
        lags.step(["a", "b"], of=3)
        lags.become_ready("ab")
        batches += 1
    assert lags.due("abz") == "z"
    assert lags.due("ab") is None, "it is not ready"
    assert batches >= 1


def test_a_row_that_steps_leaves_or_comes_back_is_due_no_more() -> None:
    lags: Lags[str] = Lags()

    def late() -> None:
        lags.become_ready("yz")
        while lags.lag("z") < LAG_MAX:
            lags.step(["y"], of=2)
            lags.become_ready("y")
        lags.become_ready("z")
        assert lags.due("yz") == "z"

    late()
    lags.step(["z"], of=2)
    lags.become_ready("z")
    assert lags.due("yz") is None, "it had its step"
    late()
    lags.forget("z")
    lags.become_ready("z")
    assert lags.lag("z") == 0
    assert lags.due("yz") is None, "it is here anew"
    lags.check_integrity("yz", "yz")
    lags.forget("z")
    lags.check_integrity("y", "y")


def test_the_one_furthest_behind_goes_first() -> None:
    lags: Lags[str] = Lags()
    lags.become_ready("xyz")
    for row in "xxyxxyxxxy":
        lags.step([row], of=3)
        lags.become_ready(row)
    lags.become_ready("z")
    while lags.due("xyz") is None:
        lags.step(["x"], of=3)
        lags.become_ready("x")
    assert lags.due("xyz") == "z"
    assert lags.lag("z") > lags.lag("y") > lags.lag("x")


def test_what_is_remembered_of_rows_that_come_and_go_is_bounded() -> None:
    """In order of arrival, where nobody asks who is due, as well."""
    ready: ReadyRows[int] = ReadyRows()
    for row in range(16):
        ready.add(row, 10)
    coming = 16
    for batch in range(4000):
        chosen = ready.choose(4, 4, 4, 1 + 3 * (batch // 2000))
        ready.take(chosen, 16)
        for row in chosen:
            # Two of four leave, so the others are seldom those that were behind.
            if row % 2 == batch % 2:
                ready.lags.forget(row)
                ready.add(coming, 10 + coming % 7 * 100)
                coming += 1
            else:
                ready.add(row, 10)
        assert len(ready.lags._behind) <= 2 * 16 + 16 + 4
    assert ready.lags._entries > 200, "hardly any row was watched"


@settings(max_examples=50, deadline=None)
@given(
    st.integers(9, 40),
    st.integers(2, 8),
    st.integers(3, 5),
    st.randoms(use_true_random=False),
)
def test_no_length_costs_a_row_its_share(rows: int, rows_max: int, wait: int, rng: Random) -> None:
    """Rows that always lie far from all others have a step in two rounds at the least."""
    lengths = {str(one): rng.choice([10, 11, 12, rng.randint(500, 900)]) for one in range(rows)}
    ready: ReadyRows[str] = ReadyRows()
    for row, length in lengths.items():
        ready.add(row, length)
    groups = groups_needed(rows, rows_max)
    steps = dict.fromkeys(lengths, 0)
    rounds = 60
    for _ in range(rounds * groups):
        chosen = ready.choose(min(rows_max, rows), rows_max, groups, wait)
        ready.take(chosen, rows)
        for row in chosen:
            steps[row] += 1
            ready.add(row, lengths[row])
        ready.lags.check_integrity(ready, lengths)
    # Each batch is for one row, and who lies near it has a ride: so not all have equally many. By
    # the bound on a wait alone it would be one step in `wait` rounds.
    assert min(steps.values()) >= 0.5 * rounds
