"""Proves that no row is behind an equal share of its replica's steps for long, wherever it lies."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.grouping import ReadyRows, groups_needed
from scheduler.turns import LAG_MAX, WATCHED, Turns


def test_equal_turns_put_nobody_behind() -> None:
    turns: Turns[str] = Turns()
    rows = list("abcdef")
    turns.become_ready(rows)
    for _ in range(10):
        for pair in ("ab", "cd", "ef"):
            turns.step(list(pair), of=6)
            turns.become_ready(pair)
            assert turns.due(rows) is None
    assert [turns.lag(row) for row in rows] == pytest.approx([0.0] * 6)
    turns.check_integrity(rows, rows)


def test_who_is_left_out_is_due_after_so_many_rounds() -> None:
    """Watched from when it comes back a round behind; until then its wait alone counts."""
    turns: Turns[str] = Turns()
    turns.become_ready("abz")
    while turns.lag("z") < WATCHED:
        turns.step(["a", "b"], of=3)
        turns.become_ready("ab")
    turns.step(["z"], of=3)
    assert turns.lag("z") < WATCHED
    while turns.lag("z") < WATCHED:
        turns.step(["a", "b"], of=3)
        turns.become_ready("ab")
    turns.become_ready("z")
    orders = 0
    while turns.due("abz") is None:
        assert turns.lag("z") < LAG_MAX
        turns.step(["a", "b"], of=3)
        turns.become_ready("ab")
        orders += 1
    assert turns.due("abz") == "z"
    assert turns.due("ab") is None, "it is not ready"
    assert orders >= 1


def test_a_row_that_steps_leaves_or_comes_back_is_due_no_more() -> None:
    turns: Turns[str] = Turns()

    def late() -> None:
        turns.become_ready("yz")
        while turns.lag("z") < LAG_MAX:
            turns.step(["y"], of=2)
            turns.become_ready("y")
        turns.become_ready("z")
        assert turns.due("yz") == "z"

    late()
    turns.step(["z"], of=2)
    turns.become_ready("z")
    assert turns.due("yz") is None, "it had its step"
    late()
    turns.forget("z")
    turns.become_ready("z")
    assert turns.lag("z") == 0
    assert turns.due("yz") is None, "it is here anew"
    turns.check_integrity("yz", "yz")
    turns.forget("z")
    turns.check_integrity("y", "y")


def test_the_one_furthest_behind_goes_first() -> None:
    turns: Turns[str] = Turns()
    turns.become_ready("xyz")
    for row in "xxyxxyxxxy":
        turns.step([row], of=3)
        turns.become_ready(row)
    turns.become_ready("z")
    while turns.due("xyz") is None:
        turns.step(["x"], of=3)
        turns.become_ready("x")
    assert turns.due("xyz") == "z"
    assert turns.lag("z") > turns.lag("y") > turns.lag("x")


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
        ready.turns.check_integrity(ready, lengths)
    # Each order is for one row, and who lies near it has a ride: so not all have equally many. By
    # the bound on a wait alone it would be one step in `wait` rounds.
    assert min(steps.values()) >= 0.5 * rounds
