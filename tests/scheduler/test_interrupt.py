"""Proves that a batch of several steps ends early when a row waits for it: within one step. That a
cancelled row ends it is shown in test_endings."""

from __future__ import annotations

from scheduler.messages import Action, Interrupt
from tests.scheduler.hand import Hand, of_kind


def long_batch() -> tuple[Hand, int]:
    """(a hand with one batch of four steps of a and b in flight, its id)."""
    hand = Hand(steps_per_batch_max=4)
    hand.join()
    hand.submit("a")
    hand.submit("b")
    while [(batch.steps, len(batch.rows)) for batch in hand.settle()] != [(4, 2)]:
        hand.work()
    return hand, hand.in_flight()[0].id


def interrupts(actions: list[Action]) -> list[int]:
    return [one.batch_id for one in of_kind(actions, Interrupt)]


def test_a_new_request_ends_it() -> None:
    hand, batch_id = long_batch()
    assert interrupts(hand.submit("c")) == [batch_id]
    assert interrupts(hand.cancel("a")) == [], "once is enough"


def test_what_concerns_others_does_not() -> None:
    hand, _ = long_batch()
    hand.join("s")
    hand.submit("c")
    assert len(hand.in_flight("r")) + len(hand.in_flight("s")) == 2
    assert interrupts(hand.cancel("c")) == []


def test_batches_of_one_step_are_never_interrupted() -> None:
    hand = Hand(steps_per_batch_max=1)
    hand.join()
    hand.submit("a")
    hand.settle()
    assert interrupts(hand.submit("b")) == []
    assert interrupts(hand.cancel("a")) == []
