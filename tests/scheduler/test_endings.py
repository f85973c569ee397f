"""Proves how requests end: exactly once, with the right tokens, and with their blocks free.

A trap of other implementations that belongs here: outputs in another batch than the caller's. Stop
tokens, those of the prompt too, and limits are in all worlds of `tests.sim`.
"""

from __future__ import annotations

import pytest

from scheduler.messages import (
    Finish,
    FinishReason,
    Interrupt,
    Reject,
    RejectCode,
    Release,
    Request,
    RowResult,
    StepDone,
    StepResult,
    Submit,
)
from tests.scheduler.hand import Hand, of_kind, only, rows_of


def test_each_request_gets_its_own_tokens_whatever_the_order_of_rows() -> None:
    """Rows of a batch stand by length; the result may list them in any order."""
    hand = Hand()
    for name, length in [("long", 9), ("short", 2), ("mid", 5)]:
        hand.submit(name, length)
    hand.join()
    (batch,) = hand.settle()
    assert rows_of(batch) == ["short", "mid", "long"]
    rows = tuple(RowResult(name, (ord(name[0]),), 1) for name in ("mid", "long", "short"))
    hand.tell(StepDone(StepResult(batch.id, "r", rows, 1)))
    assert hand.tokens == {name: [ord(name[0])] for name in ("long", "short", "mid")}


@pytest.mark.parametrize(
    ("committed", "reason"),
    [((5,) * 4, FinishReason.LENGTH), ((5, 5, 7), FinishReason.STOP), ((7, 5, 5), None)],
)
def test_a_request_that_comes_with_all_its_tokens_ends_at_once(
    committed: tuple[int, ...], reason: FinishReason | None
) -> None:
    hand = Hand()
    hand.join()
    actions = hand.submit("a", max_new_tokens=4, committed=committed, stop_token_ids=(7,))
    assert [finish.reason for finish in of_kind(actions, Finish)] == [reason] * bool(reason)
    assert len(hand.in_flight()) == (reason is None)


@pytest.mark.parametrize("in_prefill", [True, False])
def test_a_row_in_flight_is_cancelled_at_once_and_released_after_its_batch(
    in_prefill: bool,
) -> None:
    hand = Hand()
    hand.join()
    hand.submit("a")
    if not in_prefill:
        hand.done(hand.settle()[0])
    (batch,) = hand.in_flight()
    actions = hand.cancel("a")
    interrupts = [] if in_prefill else [Interrupt("r", batch.id)]
    assert of_kind(actions, Interrupt) == interrupts, "a batch of several steps ends early"
    assert [type(action) for action in actions if not isinstance(action, Interrupt)] == [Finish]
    assert hand.cancel("a") == []
    assert hand.used() > 0
    actions = hand.done(batch, a=(5, 6))
    assert actions == [Release("r", ("a",))], "its tokens are dropped"
    assert hand.used() == 0


def test_a_deadline_ends_waiting_and_running_requests_with_the_tokens_so_far() -> None:
    hand = Hand()
    hand.join(kv_blocks=2)
    hand.submit("runs", 3, 5, timeout_s=1.0)
    hand.submit("waits", 3, 5, timeout_s=2.0)
    (batch,) = hand.settle()
    hand.done(batch, runs=(7,))
    assert hand.tick(0.999) == []
    finish = only(hand.tick(1.0), Finish)
    assert (finish.request_id, finish.reason) == ("runs", FinishReason.DEADLINE)
    assert finish.usage.completion_tokens == 1
    assert only(hand.tick(2.5), Finish).request_id == "waits"
    assert hand.tokens == {"runs": [7]}
    assert hand.tick(9.0) == []


def test_a_result_that_comes_with_the_deadline_still_counts() -> None:
    hand = Hand()
    hand.join()
    hand.submit("a", max_new_tokens=2, timeout_s=1.0)
    (batch,) = hand.settle()
    hand.now_s = 5.0
    hand.done(batch, a=(1, 2))
    assert hand.finishes["a"].reason is FinishReason.LENGTH


def test_what_an_earlier_incarnation_accepted_is_not_refused_for_load() -> None:
    hand = Hand(waiting_requests_max=1)
    hand.submit("a")
    assert only(hand.submit("b"), Reject).code is RejectCode.OVERLOADED
    assert hand.tell(Submit(Request("c", (1, 2), 4), admitted_before=True)) == []
    assert hand.waiting() == ["a", "c"]
