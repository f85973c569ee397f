"""Proves that KV blocks may run out and nothing is lost: which sequence goes, comes back, and when.

With kv_reserve below 1 a replica takes more sequences than would fit at their limits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from scheduler.messages import BatchKind, Priority, ReplicaSpec
from tests.scheduler.hand import Hand, released, rows_of


def tight(**config: object) -> Hand:
    """One replica of 12 blocks of 4 positions; nothing is set aside for tokens to come."""
    hand = Hand(kv_reserve=0.0, draft_len=0, steps_per_batch_max=1, **config)
    hand.join(kv_blocks=12)
    return hand


def run(hand: Hand, rounds: int = 500) -> int:
    """Answers batches until none is left; returns how many were prefills."""
    prefills = 0
    for _ in range(rounds):
        batches = hand.in_flight()
        if not batches:
            return prefills
        prefills += batches[0].kind is BatchKind.PREFILL
        hand.done(batches[0])
    raise AssertionError("it does not end")


def preempted(hand: Hand) -> list[str]:
    """The sequences that are sent back first."""
    for _ in range(200):
        gone = [name for name in released(hand.work()) if name not in hand.finishes]
        if gone:
            return gone
    raise AssertionError("none is sent back")


@pytest.mark.parametrize(("lowest", "goes"), [("", "c"), ("b", "b")])
def test_the_youngest_of_the_lowest_priority_goes(lowest: str, goes: str) -> None:
    hand = tight()
    for name in "abc":
        priority = Priority.LOW if name == lowest else Priority.NORMAL
        hand.submit(name, length=4, max_new_tokens=24, priority=priority)
    assert preempted(hand) == [goes]


def test_what_was_sent_back_keeps_its_tokens_and_waits_until_all_that_it_needs_is_free() -> None:
    hand = tight()
    for name in "abc":
        hand.submit(name, length=4, max_new_tokens=24)
    preempted(hand)
    committed = len(hand.tokens["c"])
    while "c" not in rows_of(hand.in_flight()[-1]):
        hand.work()
    (row,) = hand.in_flight()[-1].prefill
    assert len(row.tokens) == 4 + committed
    assert row.blocks == 7, "all of its 28 tokens are set aside"
    run(hand)
    usage = hand.finishes["c"].usage
    assert usage.recovered == 1, "it is sent back once, never twice"
    assert usage.replicas == ("r",), "one that it came back to is named once"


def test_where_blocks_run_out_beside_one_that_was_sent_back_before_another_goes() -> None:
    """Though that one is of a higher class: it is the one that grows."""
    hand = tight()
    for name in "abc":
        hand.submit(name, length=4, max_new_tokens=24)
    assert preempted(hand) == ["c"]
    while "b" not in hand.finishes or "c" in hand.waiting():
        hand.work()
    hand.submit("high", length=16, max_new_tokens=30, priority=Priority.HIGH)
    assert preempted(hand) == ["high"]


@pytest.mark.parametrize(("new", "before"), [(20, "a"), (21, "b")])
def test_what_was_sent_back_comes_again_as_soon_as_all_can_grow_to_their_limits(
    new: int, before: str
) -> None:
    """Exactly: 6 blocks for b at its longest and 6 for c are the 12 that there are. With one token
    more b has 7: though c fits beside it when a has ended, b would have to go for it later."""
    hand = tight()
    for name, length, most in (("a", 20, 8), ("b", 4, new), ("c", 4, 20)):
        hand.submit(name, length=length, max_new_tokens=most)
    hand.work(8)
    assert hand.waiting() == ["c"]
    assert hand.sequences()[2].preempted
    while before not in hand.finishes:
        assert "c" in hand.waiting()
        hand.work()
    assert "c" not in hand.waiting()
    assert len(hand.finishes) == "ab".index(before) + 1
    run(hand)
    assert hand.scheduler.snapshot().preempted == 1


def test_what_was_sent_back_goes_at_once_to_another_replica_that_has_room() -> None:
    hand = tight()
    for name in "abc":
        hand.submit(name, length=4, max_new_tokens=24)
    hand.settle()
    hand.join("s", kv_blocks=12)
    assert preempted(hand) == ["c"]
    assert [rows_of(batch) for batch in hand.in_flight("s")] == [["c"]]


def test_what_was_sent_back_waits_in_the_order_of_its_class() -> None:
    hand = tight()
    for name in "abc":
        hand.submit(name, length=4, max_new_tokens=24)
    hand.submit("urgent", length=40, max_new_tokens=8, priority=Priority.HIGH)
    assert preempted(hand) == ["c"]
    assert hand.waiting() == ["urgent", "c"]


def test_none_is_sent_back_while_a_batch_is_in_flight_that_may_free_blocks() -> None:
    """Each row has 3 of 6 blocks, and at 12 tokens needs one more."""
    hand = Hand(kv_reserve=0.0, draft_len=0, steps_per_batch_max=1, rows_max=1)
    hand.join(kv_blocks=6)
    hand.submit("a", length=4, max_new_tokens=9)
    hand.submit("b", length=4, max_new_tokens=20)
    hand.settle()
    while hand.used() < 6 or len(hand.in_flight()) == 2:
        hand.work()
    assert hand.scheduler.snapshot().preempted == 0


def test_a_full_replica_does_not_prefill_and_send_back_for_every_step() -> None:
    hand = tight()
    for index in range(8):
        hand.submit(f"q{index}", length=4, max_new_tokens=40)
    prefills = run(hand, 2000)
    assert prefills <= 8 + hand.scheduler.snapshot().preempted
    assert hand.scheduler.snapshot().preempted <= 8


def test_steps_are_given_up_before_a_sequence_is() -> None:
    hand = Hand(kv_reserve=0.0, draft_len=3, steps_per_batch_max=4)
    hand.join(kv_blocks=5)
    hand.submit("a", length=4, max_new_tokens=12)
    hand.submit("b", length=4, max_new_tokens=3)
    batches = hand.settle()
    assert [batch.steps for batch in batches] == [1], "16 tokens ahead do not fit, 4 do"
    assert hand.scheduler.snapshot().preempted == 0


def test_a_reservation_lets_those_pass_that_are_before_it_in_the_queue() -> None:
    """A higher class that fits does not wait behind a lower one that does not."""
    hand = Hand(draft_len=0, steps_per_batch_max=1)
    hand.join(kv_blocks=20)
    hand.submit("long", length=4, max_new_tokens=40)
    hand.settle()
    hand.submit("low", length=4, max_new_tokens=60, priority=Priority.LOW)
    hand.work()
    assert hand.used() + 2 <= 20, "there is room for one more like it"
    hand.submit("later", length=4, max_new_tokens=4, priority=Priority.LOW)
    hand.submit("high", length=4, max_new_tokens=4, priority=Priority.HIGH)
    hand.work(8)
    assert hand.tokens["high"]
    assert "later" not in hand.tokens
    run(hand)
    assert len(hand.finishes) == 4


# ------------------------------------------------------------------------------ kinds of layers

KINDS = ((1, None), (5, 4))
"""One table that keeps all and five of layers with a window, which keep 4 blocks."""


def test_a_sequence_is_counted_by_what_its_kinds_of_layers_keep() -> None:
    spec = ReplicaSpec(100, 4, 512, 1000, kv_groups=KINDS)
    assert [spec.blocks_taken(blocks) for blocks in (0, 1, 4, 5, 40)] == [0, 6, 24, 25, 60]
    assert spec.length_max == 80 * 4, "80 blocks and 20 of windows"
    assert replace(spec, context_len=300).length_max == 300
    assert replace(spec, prefix_sharing=True).texts_kept == 100 // 6
    assert ReplicaSpec(100, 4, 512, 1000).length_max == 400


def test_more_sequences_have_room_where_most_layers_keep_a_window() -> None:
    """Each of 160 tokens takes 60 blocks, where six full tables would take 240."""
    for groups, placed in ((KINDS, 4), (((6, None),), 1)):
        hand = Hand(draft_len=0)
        hand.join(kv_blocks=240, kv_groups=groups)
        for name in "abcde":
            hand.submit(name, length=100, max_new_tokens=60)
        hand.settle()
        assert len(hand.scheduler.pool.replicas["r"].residents) == placed
        assert hand.used() == 240


def test_growth_beyond_the_window_takes_blocks_of_full_layers_alone() -> None:
    hand = Hand(draft_len=3, steps_per_batch_max=1, kv_reserve=0.0)
    hand.join(kv_blocks=60, kv_groups=KINDS)
    hand.submit("a", length=16, max_new_tokens=100)
    used = []
    while "a" not in hand.finishes:
        used.append(hand.used())
        hand.work()
    assert used[0] == 4 + 20
    assert used[-1] == 29 + 20
    assert {after - before for before, after in pairwise(used)} == {0, 1}


def test_blocks_that_run_out_send_back_who_has_more_than_its_window() -> None:
    hand = Hand(kv_reserve=0.0, draft_len=0, steps_per_batch_max=1)
    hand.join(kv_blocks=60, kv_groups=KINDS)
    for name in "ab":
        hand.submit(name, length=20, max_new_tokens=60)
    assert preempted(hand) == ["b"]
    run(hand)
    assert set(hand.finishes) == {"a", "b"}
    assert hand.finishes["b"].usage.recovered == 1
