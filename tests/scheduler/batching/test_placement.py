"""Proves where a waiting sequence goes: room, balance, prefix, load; and none starves."""

from __future__ import annotations

import pytest

from tests.scheduler.hand import Hand, rows_of


def where(hand: Hand) -> dict[str, str]:
    return {one.id: one.replica_id for one in hand.sequences() if one.replica_id}


def test_load_goes_before_length_when_the_imbalance_is_large() -> None:
    hand = Hand(rows_max=2)
    hand.join("one")
    for index in range(3):
        hand.submit(str(index), 10)
        hand.settle("one")
    hand.join("two")
    hand.submit("elsewhere", 200)
    assert where(hand)["elsewhere"] == "two"
    hand.work(2, "one", "two")
    for index in range(12):
        hand.submit(f"more{index}", 10)
        hand.work(2, "one", "two")
    loads = [hand.replica(name).load for name in ("one", "two")]
    assert sum(loads) == 16
    assert abs(loads[0] - loads[1]) <= 2 + 1


def test_blocks_are_reserved_for_the_whole_sequence() -> None:
    hand = Hand()
    hand.join(kv_blocks=10, block_size=4)
    hand.submit("a", 3, 18)  # 21 positions: 6 blocks
    assert hand.used() == 6
    hand.submit("b", 3, 13)  # 4 blocks
    hand.settle()
    assert hand.used() == 10
    hand.submit("c", 3, 1)  # a block more: no room
    assert set(where(hand)) == {"a", "b"}


def test_a_lighter_replica_without_free_blocks_is_not_waited_for() -> None:
    hand = Hand()
    hand.join("small", kv_blocks=20, block_size=10)
    hand.submit("a", 100, 100)  # all 20 blocks
    hand.join("large")
    for index in range(3):
        hand.submit(str(index), 3, 50)
        hand.work(3, "small", "large")
    hand.submit("near", 100, 50)
    assert where(hand)["near"] == "large"


FIVE_SMALL = {"kv_blocks": 10, "block_size": 400, "context_len": 9999}
"""A replica that holds five small sequences, or a big one and a small one."""


def submit_small(hand: Hand, name: str) -> None:
    hand.submit(name, 4, 700)  # 2 blocks


def full(small: int, *replica_ids: str) -> Hand:
    """These replicas are full of small sequences; a big one waits, and then so many small ones."""
    hand = Hand()
    for replica_id in replica_ids:
        hand.join(replica_id, **FIVE_SMALL)
    for index in range(5 * len(replica_ids)):
        submit_small(hand, f"old{index}")
        hand.work(2, *replica_ids)
    assert all(hand.used(replica_id) == 10 for replica_id in replica_ids)
    hand.submit("big", 4, 3100)  # 8 blocks
    for index in range(small):
        submit_small(hand, f"small{index}")
    return hand


def finish_one(hand: Hand, replica_id: str) -> None:
    """Cancels the oldest resident and answers what is in flight, so that its blocks are free."""
    for oldest in list(hand.replica(replica_id).residents)[:1]:
        hand.cancel(oldest)
    hand.work(4, replica_id)


def test_a_sequence_that_does_not_fit_holds_the_line() -> None:
    hand = full(30, "r")
    for _ in range(5):
        finish_one(hand, "r")
    assert "big" in where(hand), "starved by smaller ones"
    prefilled = [rows_of(batch) for batch in hand.batches.values() if batch.prefill]
    order_of_start = [name for rows in prefilled for name in rows]
    before_big = order_of_start[: order_of_start.index("big")]
    assert not any(name.startswith("small") for name in before_big)


def test_a_held_line_on_one_replica_does_not_stop_the_others() -> None:
    hand = full(60, "one", "two")
    for name in ("one", "two", "one", "two"):
        if hand.replica(name).reserved_for is None:
            finish_one(hand, name)
    (reserved,) = (one for one in ("one", "two") if hand.replica(one).reserved_for == "big")
    (other,) = {"one", "two"} - {reserved}
    for _ in range(10):
        finish_one(hand, other)
        assert hand.used(other) == 10, "the other replica goes idle"
    assert "big" in hand.waiting()
    for _ in range(4):
        finish_one(hand, reserved)
    assert where(hand)["big"] == reserved


@pytest.mark.parametrize("end", ["cancel", "lose", "drain"])
def test_a_reservation_ends_with_the_sequence_or_with_the_replica(end: str) -> None:
    hand = full(9, "r")
    replica = hand.replica()
    while replica.reserved_for is None:
        finish_one(hand, "r")
    if end == "cancel":
        hand.cancel("big")
        hand.work(4)
        assert hand.used() == 10, "the line moves again"
    else:
        getattr(hand, end)("r")
        hand.join("next", **FIVE_SMALL)
        # Whoever was in flight when it died comes in by itself first.
        hand.work(120 if end == "lose" else 4, "next")
        assert hand.used("next") >= 8
    assert replica.reserved_for != "big"
