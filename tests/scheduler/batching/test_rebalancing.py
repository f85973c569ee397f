"""Proves that residents move to a lighter replica when it is worth their prefill, and only then."""

from __future__ import annotations

import pytest

from scheduler.batching import lightest, rows_to_move
from scheduler.batching.placement import PREFILL_TOKENS_PER_STEP
from scheduler.messages import BatchKind
from scheduler.state import Sequence
from tests.scheduler.hand import Hand, rows_of


def loaded(count: int, max_new_tokens: int = 400, length: int = 3, **config: object) -> Hand:
    """That many rows on replica r, none waiting."""
    hand = Hand(rows_max=4, draft_len=0, steps_per_batch_max=1, **config)
    hand.join(kv_blocks=10_000)
    for index in range(count):
        hand.submit(f"q{index}", length=length, max_new_tokens=max_new_tokens)
    while hand.waiting():
        hand.work()
    hand.settle()
    return hand


def test_a_new_replica_gets_work_though_none_waits() -> None:
    hand = loaded(16)
    hand.join("s", kv_blocks=10_000)
    assert not hand.in_flight("s")
    hand.work()
    (batch,) = hand.in_flight("s")
    assert batch.kind is BatchKind.PREFILL
    moved = rows_of(batch)
    assert 4 <= len(moved) <= 8
    assert hand.scheduler.snapshot().moved == len(moved)
    for row in batch.prefill:
        assert len(row.tokens) == 3 + len(hand.tokens.get(row.sequence_id, ()))


@pytest.mark.parametrize(
    ("more", "apart"), [({}, 4), ({"length": 60, "prefill_tokens_max": 32}, 8)]
)
def test_the_imbalance_settles_and_none_goes_back(more: dict[str, int], apart: int) -> None:
    """Also of rows that are longer than a prefill batch."""
    hand = loaded(16, **more)
    hand.join("s", kv_blocks=10_000)
    hand.work(60, "r", "s")
    loads = [hand.replica(name).load for name in "rs"]
    assert max(loads) - min(loads) <= apart
    assert 4 <= hand.scheduler.snapshot().moved <= 8


@pytest.mark.parametrize(
    ("count", "request_of", "kv_blocks"),
    [
        (4, {}, 10_000),  # all fit into one batch
        (16, {"max_new_tokens": 6, "length": 400}, 10_000),  # they are nearly done
        (16, {}, 2),  # the other has no room
    ],
)
def test_none_moves_where_it_gains_nothing(
    count: int, request_of: dict[str, int], kv_blocks: int
) -> None:
    hand = loaded(count, **request_of)
    hand.join("s", kv_blocks=kv_blocks)
    hand.work(3)
    assert hand.scheduler.snapshot().moved == 0


@pytest.mark.parametrize(("prefill_rows_max", "most"), [(4, 4), (8, 8), (16, 11)])
def test_rows_that_gain_most_move_and_no_more_than_evens_the_two(
    prefill_rows_max: int, most: int
) -> None:
    """A row gains the turns that it saves of its tokens to come, less what its prefill costs. One
    chunk and the blocks of the other replica bound how many."""
    config = {"rows_max": 4, "prefill_rows_max": prefill_rows_max}
    hand = Hand(draft_len=0, steps_per_batch_max=1, **config)
    hand.join(kv_blocks=10_000)
    for index in range(24):
        hand.submit(f"q{index}", length=20, max_new_tokens=200 + 10 * index)
    while hand.waiting():
        hand.work()
    hand.settle()
    source, turns, turns_there = hand.replica(), 24 / 4, -(-(2 + prefill_rows_max) // 4)

    def gain(row: Sequence) -> float:
        saved = row.tokens_left * (1 - turns_there / turns)
        return saved - row.length / PREFILL_TOKENS_PER_STEP

    best = sorted(source.ready, key=lambda row: (-gain(row), row.number))[:most]
    hand.join("s", kv_blocks=10_000)
    hand.submit("there")
    hand.submit("too")
    assert (source.load, hand.replica("s").load) == (24, 2)

    def moved(chunk: int, target: str = "s") -> list[Sequence]:
        return rows_to_move(source, hand.replica(target), hand.scheduler.config, chunk)

    assert moved(10_000) == best
    for count in range(1, most + 1):
        chunk = sum(row.length for row in best[:count])
        assert moved(chunk) == best[:count]
        assert moved(chunk - 1) == best[: max(count - 1, 1)]
    room = sum(hand.replica("s").room_for(row) for row in best[:3])
    hand.join("small", kv_blocks=room)
    fit = moved(10_000, "small")
    assert fit[:3] == best[:3]
    assert sum(hand.replica("small").room_for(row) for row in fit) <= room


def test_rows_that_gain_nothing_stay_beside_others_that_move() -> None:
    """A row has more to gain by half a step with each token that it may still commit."""
    hand = Hand(rows_max=4, draft_len=0, steps_per_batch_max=1, prefill_rows_max=8)
    hand.join(kv_blocks=10_000, context_len=1000)
    length = 20 * PREFILL_TOKENS_PER_STEP
    for index in range(16):
        hand.submit(f"q{index}", length=length, max_new_tokens=36 + index)
    while hand.waiting():
        hand.work()
    hand.settle()
    hand.join("s", kv_blocks=10_000, context_len=1000)
    source, target = hand.replica(), hand.replica("s")
    gains = {
        row.id: row.tokens_left * (1 - 2 / 4) - row.length / PREFILL_TOKENS_PER_STEP
        for row in source.ready
    }
    worth = {name for name, gain in gains.items() if gain > 0}
    assert any(-1 < gain <= 0 for gain in gains.values())
    assert any(0 < gain <= 1 for gain in gains.values())
    moved = rows_to_move(source, target, hand.scheduler.config, 10**6)
    assert 0 < len(worth) < 8
    assert {row.id for row in moved} == worth


@pytest.mark.parametrize("count", range(1, 18))
def test_rows_move_only_to_a_replica_that_is_over_a_batch_lighter_and_only_to_save_turns(
    count: int,
) -> None:
    hand = loaded(count)
    hand.join("s", kv_blocks=10_000)
    source, pool = hand.replica(), hand.scheduler.pool
    target = lightest(source, pool)
    worth = source.load > 4  # all of one batch step each time
    assert target is (hand.replica("s") if worth else None)
    hand.submit("long", length=9, max_new_tokens=490)
    assert lightest(hand.replica("s"), pool) is None, "the other one is heavier"
    assert lightest(source, pool) is (hand.replica("s") if source.load - 1 > 4 else None)
