"""Proves what the lag of a ready row is: by how many steps an equal share is ahead of its own.

Which rows step next is proved in `tests/scheduler/batching/test_grouping.py`.
"""

from __future__ import annotations

from math import inf

from scheduler.messages import Request
from scheduler.state import ReadyRows, Sequence
from tests.scheduler.hand import Hand


def rows_of(ready: ReadyRows, *committed: int) -> list[Sequence]:
    """Ready rows that have committed so many tokens."""
    rows = [
        Sequence(Request(str(number), (1,), 100), number, committed=[1] * tokens)
        for number, tokens in enumerate(committed)
    ]
    for row in rows:
        ready.add(row)
    return rows


def step(ready: ReadyRows, row: Sequence, of: int, tokens: int = 1) -> None:
    """A batch of this row alone, of so many rows that step there, commits these tokens."""
    ready.take([row], of)
    row.committed += [1] * tokens
    ready.add(row)
    ready.check_integrity()


def test_a_lag_is_what_an_equal_share_has_more_than_the_row_had() -> None:
    """So one step does not make up for many."""
    ready = ReadyRows()
    greedy, patient = rows_of(ready, 1, 1)
    for _ in range(10):
        step(ready, greedy, of=2)
    assert ready.most_behind() == (5.0, patient)
    step(ready, patient, of=2)
    assert ready.most_behind() == (4.5, patient), "5.5 steps each, of which it had one"
    for _ in range(9):
        step(ready, patient, of=2)
    assert ready.most_behind() == (0.0, greedy)


def test_a_row_that_comes_owes_nothing_and_its_first_step_counts() -> None:
    ready = ReadyRows()
    (early,) = rows_of(ready, 1)
    for _ in range(10):
        step(ready, early, of=2)
    ready.remove(early)
    (new,) = rows_of(ready, 0)
    step(ready, new, of=2)
    assert ready.most_behind() == (-1.0, new)


def test_a_row_is_behind_all_others_until_it_has_committed_a_token() -> None:
    """Also after a batch that failed."""
    ready = ReadyRows()
    _, new = rows_of(ready, 1, 0)
    assert ready.most_behind() == (inf, new)
    step(ready, new, of=2, tokens=0)
    assert ready.most_behind() == (inf, new)
    step(ready, new, of=2)
    assert ready.most_behind()[1] is not new


def test_a_replica_counts_what_steps_so_a_long_row_is_not_left_behind_by_short_ones() -> None:
    hand = Hand(draft_len=0, steps_per_batch_max=1, rows_max=2, batches_in_flight_max=1)
    hand.join()
    for name, length in (("a", 3), ("b", 3), ("long", 200)):
        hand.submit(name, length=length)
    hand.settle()
    hand.work(60)
    assert len(hand.tokens["long"]) > 20, "of 60 batches with two of the three rows"
