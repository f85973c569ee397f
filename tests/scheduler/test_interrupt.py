"""Proves that a batch of several steps ends early when a row waits for it: within one step."""

from __future__ import annotations

from scheduler.messages import Action, BatchKind, Interrupt
from tests.scheduler.hand import Hand, of_kind


def long_batch() -> tuple[Hand, int]:
    """(a hand with one batch of four steps of a and b in flight, its id)."""
    hand = Hand(steps_per_batch_max=4)
    hand.join()
    hand.submit("a")
    hand.submit("b")
    while [(batch.steps, len(batch.rows)) for batch in hand.settle()] != [(4, 2)]:
        hand.done(hand.in_flight()[0])
    return hand, hand.in_flight()[0].id


def interrupts(actions: list[Action]) -> list[int]:
    return [one.batch_id for one in of_kind(actions, Interrupt)]


def test_a_cancelled_row_ends_it() -> None:
    hand, batch_id = long_batch()
    assert interrupts(hand.cancel("a")) == [batch_id]
    assert interrupts(hand.cancel("b")) == [], "once is enough"


def test_a_new_request_ends_it() -> None:
    hand, batch_id = long_batch()
    actions = hand.submit("c")
    assert interrupts(actions) == [batch_id]
    assert hand.in_flight()[-1].kind is BatchKind.PREFILL


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
