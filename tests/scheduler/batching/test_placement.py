"""Proves where a waiting sequence goes: room, balance, prefix, load; and none starves."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from scheduler.batching.placement import PREFIX_TOKENS_PER_ROW, best_replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Batch, BatchKind, ReplicaSpec, Request
from scheduler.state import Pool, ReplicaRecord, Sequence
from tests.scheduler.hand import Hand, batches_of, rows_of


def where(hand: Hand) -> dict[str, str]:
    return {
        sequence.id: sequence.replica_id for sequence in hand.sequences() if sequence.replica_id
    }


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


@pytest.mark.parametrize("rows_max", [1, 2, 3])
def test_of_a_burst_a_replica_takes_no_more_than_a_batch_beyond_a_lighter_one(
    rows_max: int,
) -> None:
    """Counted with the rows that it takes in the same prefill batch."""
    hand = Hand(rows_max=rows_max, batches_in_flight_max=1)
    for name in ("one", "two"):
        hand.join(name)
        hand.submit(name)
    assert [hand.replica(name).load for name in ("one", "two")] == [1, 1]
    for index in range(20):
        hand.submit(str(index))
    assert len(hand.waiting()) == 20, "both are busy"
    while hand.replica("one").load == 1:
        hand.work(1, "one")
    assert hand.replica("one").load == 1 + rows_max + 1


def test_the_only_replica_takes_more_than_a_batch_of_rows_in_one_prefill() -> None:
    hand = Hand(rows_max=2, prefill_rows_max=8)
    for index in range(8):
        hand.submit(str(index))
    (batch,) = batches_of(hand.join())
    assert len(batch.prefill) == 8


LONG = tuple(range(200))
REPLICAS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([20, 60, 1000]), st.booleans(), st.booleans()),
    min_size=1,
    max_size=4,
)


def pool_of(replicas: list[tuple[int, int, bool, bool]], rows_max: int) -> Pool:
    """Of replicas with so many residents of two blocks, so many blocks, a place for a batch or
    none, and the KV of LONG or not."""
    config = SchedulerConfig(
        rows_max=rows_max, residents_max=9, batches_in_flight_max=1, kv_reserve=1.0
    )
    pool = Pool(config)
    for index, (load, kv_blocks, busy, has_prefix) in enumerate(replicas):
        pool.join(f"r{index}", ReplicaSpec(kv_blocks, 4, 512, 1000, prefix_sharing=has_prefix))
        replica = pool.replicas[f"r{index}"]
        if has_prefix:
            replica.note_prefix(Sequence(Request("gone", LONG, 9), 0))
        for number in range(load):
            resident = pool.admit(Request(f"{index} {number}", (1, 2), 6), 0.0)
            pool.waiting.add(resident)
            pool.place(resident, replica, 0.0)
        if busy:
            some = [Sequence(Request("any", (1,), 1), 0)]
            replica.pipeline.send(Batch(1, replica.id, BatchKind.PREFILL), some, 0.0)
    return pool


@given(REPLICAS, st.integers(1, 4), st.sampled_from([2, 12, 66, 140, 200]))
def test_a_sequence_goes_where_the_rules_say(
    replicas: list[tuple[int, int, bool, bool]], rows_max: int, length: int
) -> None:
    """Room first; then no replica over a batch heavier than the lightest with room; then its prefix
    and the fewest residents; then the lowest id. One without a place for a batch is passed over."""
    pool = pool_of(replicas, rows_max)
    sequence = Sequence(Request("new", LONG[:length], 4), 99)
    blocks = -(-(length + 4) // 4)
    records = list(pool.replicas.values())
    with_room = [record for record in records if record.load < 9 and record.blocks_free >= blocks]
    lightest = min((record.load for record in with_room), default=0)
    free = [
        record
        for record in with_room
        if not record.pipeline.batches and record.load <= lightest + rows_max
    ]
    shared = (length - 2) // 4 * 4  # the last token has no KV, the one before is written anew

    def rank(one: ReplicaRecord) -> tuple[int, int, str]:
        worth = shared // PREFIX_TOKENS_PER_ROW if one.spec.prefix_sharing else 0
        return min(one.load - worth, lightest), one.load, one.id

    best = min(free, key=rank, default=None)
    assert best_replica(sequence, pool) is best


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
    (reserved,) = (name for name in ("one", "two") if hand.replica(name).reserved_for == "big")
    (other,) = {"one", "two"} - {reserved}
    for _ in range(10):
        finish_one(hand, other)
        assert hand.used(other) == 10, "the other replica goes idle"
    assert "big" in hand.waiting()
    for _ in range(4):
        finish_one(hand, reserved)
    assert where(hand)["big"] == reserved


def test_a_replica_takes_others_as_soon_as_the_one_that_reserved_it_goes_elsewhere() -> None:
    hand = full(20, "one")
    finish_one(hand, "one")
    assert hand.replica("one").reserved_for == "big"
    assert hand.used("one") < 10
    taken = hand.join("three", **FIVE_SMALL)
    assert where(hand)["big"] == "three"
    assert {batch.replica_id for batch in batches_of(taken)} == {"one", "three"}


@pytest.mark.parametrize("end", ["cancel", "lose", "drain"])
def test_a_reservation_ends_with_the_sequence_or_with_the_replica(end: str) -> None:
    hand = full(9, "r")
    replica = hand.replica()
    while replica.reserved_for is None:
        finish_one(hand, "r")
    if end == "cancel":
        assert batches_of(hand.cancel("big")), "it takes others at once"
        hand.work(4)
        assert hand.used() == 10, "the line moves again"
    else:
        getattr(hand, end)("r")
        hand.join("next", **FIVE_SMALL)
        # Whoever was in flight when it died comes in by itself first.
        hand.work(120 if end == "lose" else 4, "next")
        assert hand.used("next") >= 8
    assert replica.reserved_for != "big"
