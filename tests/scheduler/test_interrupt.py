"""Proves that an order of several steps ends early when somebody waits for it: within one step."""

from __future__ import annotations

from scheduler.messages import Action, Interrupt, OrderKind
from tests.scheduler.hand import Hand, of_kind


def long_order() -> tuple[Hand, int]:
    """(a hand with one order of four steps of a and b in flight, its id)."""
    hand = Hand(steps_per_order_max=4)
    hand.join()
    hand.submit("a")
    hand.submit("b")
    while [(order.steps, len(order.rows)) for order in hand.settle()] != [(4, 2)]:
        hand.done(hand.in_flight()[0])
    return hand, hand.in_flight()[0].id


def interrupts(actions: list[Action]) -> list[int]:
    return [one.order_id for one in of_kind(actions, Interrupt)]


def test_a_cancelled_row_ends_it() -> None:
    hand, order_id = long_order()
    assert interrupts(hand.cancel("a")) == [order_id]
    assert interrupts(hand.cancel("b")) == [], "once is enough"


def test_a_new_request_ends_it() -> None:
    hand, order_id = long_order()
    actions = hand.submit("c")
    assert interrupts(actions) == [order_id]
    assert hand.in_flight()[-1].kind is OrderKind.PREFILL


def test_a_deadline_ends_it() -> None:
    hand, _ = long_order()
    hand.submit("c", timeout_s=5.0)
    while [(order.steps, len(order.rows)) for order in hand.settle()] != [(4, 3)]:
        hand.done(hand.in_flight()[0])
    (order,) = hand.in_flight()
    assert interrupts(hand.tick(6.0)) == [order.id]


def test_what_concerns_others_does_not() -> None:
    hand, _ = long_order()
    hand.join("s")
    hand.submit("c")
    assert len(hand.in_flight("r")) + len(hand.in_flight("s")) == 2
    assert interrupts(hand.cancel("c")) == []


def test_orders_of_one_step_are_never_interrupted() -> None:
    hand = Hand(steps_per_order_max=1)
    hand.join()
    hand.submit("a")
    hand.settle()
    assert interrupts(hand.submit("b")) == []
    assert interrupts(hand.cancel("a")) == []
