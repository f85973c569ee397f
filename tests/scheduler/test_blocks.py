"""Proves that KV blocks may run out and nothing is lost: which sequence goes, comes back, and when.

With kv_reserve below 1 a replica takes more sequences than would fit at their limits.
"""

from __future__ import annotations

import pytest

from scheduler.messages import BatchKind, Priority
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
    while True:
        gone = [name for name in released(hand.work()) if name not in hand.finishes]
        if gone:
            return gone


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
    assert hand.finishes["c"].usage.recovered == 1, "it is sent back once, never twice"


def test_what_was_sent_back_comes_again_as_soon_as_all_can_grow_to_their_limits() -> None:
    """Exactly: 6 blocks for b at its longest and 6 for c are the 12 that there are."""
    hand = tight()
    for name, length, new in (("a", 20, 8), ("b", 4, 20), ("c", 4, 20)):
        hand.submit(name, length=length, max_new_tokens=new)
    hand.work(8)
    assert hand.waiting() == ["c"]
    assert hand.sequences()[2].preempted
    for _ in range(3):
        assert "c" in hand.waiting() or "a" in hand.finishes
        hand.work()
    assert "a" in hand.finishes
    assert "c" not in hand.waiting()
    assert "b" not in hand.finishes


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
