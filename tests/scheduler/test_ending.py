"""Proves that late rows have a place in every group, that few have, and that ends come together."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from scheduler import dispatching
from scheduler.ending import LATE_SHARE, with_late
from scheduler.grouping import passes_bound
from scheduler.messages import Request
from scheduler.sequence import Sequence
from tests.scheduler.hand import Hand, rows_of


def rows_with(tokens_left: list[int]) -> list[Sequence]:
    """Rows that have committed one token, by how many they have left."""
    return [
        Sequence(Request(str(at), (1,), left + 1), at, 0.0, committed=[2])
        for at, left in enumerate(tokens_left)
    ]


def ids(rows: list[Sequence]) -> list[str]:
    return sorted(one.id for one in rows)


def test_a_row_without_laxity_takes_the_place_of_the_one_with_least_left() -> None:
    rows = rows_with([30, 20, 40, 30, 60, 10])
    # 190 tokens in places of 4: one that has 48 left or more has none to lose.
    assert ids(with_late(rows[:4], rows, 190)) == ["0", "2", "3", "4"]


def test_where_all_have_time_the_group_stays() -> None:
    rows = rows_with([30, 20, 40, 30, 40, 30])
    assert with_late(rows[:4], rows, 190) == rows[:4]


def test_a_late_row_that_is_in_the_group_displaces_nobody() -> None:
    rows = rows_with([60, 20, 40, 30, 30, 10])
    assert with_late(rows[:4], rows, 190) == rows[:4]


def test_at_most_a_share_of_the_group_is_taken_by_late_rows_the_latest_first() -> None:
    rows = rows_with([1] * 8 + [50, 90, 70, 60])
    group = with_late(rows[:8], rows, 278)
    assert len(group) == 8
    assert {one.id for one in group} - {str(at) for at in range(8)} == {"9", "10"}
    assert 8 // LATE_SHARE == 2


def test_who_waits_for_a_first_token_is_not_displaced() -> None:
    rows = rows_with([10, 20, 30, 40, 90])
    new = Sequence(Request("new", (1,), 5), 9, 0.0)
    group = with_late([new, *rows[1:4]], [new, *rows], 195)
    assert ids(group) == ["2", "3", "4", "new"]


@pytest.mark.parametrize("rows_max", [4, 8, 16])
def test_one_long_request_among_short_ones_hardly_outlasts_them(rows_max: int) -> None:
    hand = Hand(
        rows_max=rows_max,
        draft_len=0,
        batches_in_flight_max=1,
        steps_per_batch_max=1,
        prefill_rows_max=64,
    )
    hand.join(kv_blocks=100_000)
    rows = 2 * rows_max - 1
    for index in range(rows):
        hand.submit(str(index), max_new_tokens=40 if index == rows - 1 else 20)
    sizes = []
    while hand.in_flight():
        (batch,) = hand.in_flight()
        if batch.rows:
            sizes.append(len(rows_of(batch)))
        hand.done(batch)
    assert sum(sizes) == 20 * (rows + 1)
    # 40 is the least, and 61 or more what it takes by length and wait alone.
    assert 40 <= len(sizes) <= 50


@pytest.mark.parametrize("wait_rounds", [1, 2, 3, 5])
def test_late_rows_let_no_other_wait_beyond_the_bound(
    wait_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    displaced = 0

    def counted(
        chosen: list[Sequence], ready: Iterable[Sequence], tokens_left: int
    ) -> list[Sequence]:
        nonlocal displaced
        group = with_late(chosen, ready, tokens_left)
        displaced += set(group) != set(chosen)
        return group

    monkeypatch.setattr(dispatching, "with_late", counted)
    for seed in range(10):
        rng = Random(seed)
        hand = Hand(
            rows_max=8,
            draft_len=0,
            batches_in_flight_max=1 + seed % 2,
            wait_rounds=wait_rounds,
            half_groups=bool(seed % 3),
        )
        hand.join(kv_blocks=100_000)
        count = rng.randint(9, 16)
        for index in range(count):
            hand.submit(str(index), rng.randint(1, 60), max_new_tokens=rng.choice([5, 20, 60]))
        (replica,) = hand.scheduler._pool.replicas.values()
        while hand.in_flight():
            hand.done(hand.in_flight()[0])
            for row in replica.ready:
                assert replica.ready.passes(row) <= passes_bound(count, 8, wait_rounds)
        assert len(hand.finishes) == count
    # With less, hardly ever is nobody due. A compiled dispatcher cannot be given another function.
    compiled = not dispatching.__file__.endswith(".py")
    assert displaced > 10 or wait_rounds < 3 or compiled, "hardly any row was late"
