"""Proves what the door promises: an event that raises leaves nothing behind, and what is expected
of requests follows what they do."""

from __future__ import annotations

import math

import pytest

from scheduler.batching import Dispatcher
from scheduler.decoding import Decoding, TokenLogprobs
from scheduler.messages import Emit, Reject, RejectCode, RowResult, StepDone, StepResult
from scheduler.state.pool import REACHED_RECENT
from tests.scheduler.hand import Hand, of_kind, only


def test_what_an_event_that_raised_had_led_to_is_no_part_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hand = Hand(draft_len=0, steps_per_batch_max=1)
    hand.join()
    hand.submit("a")
    batch = hand.settle()[0]
    with monkeypatch.context() as broken:
        broken.setattr(Dispatcher, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hand.done(batch)
    assert not of_kind(hand.tick(1.0), Emit)


def test_a_replica_may_be_lost_in_the_next_event_after_one_that_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hand = Hand()
    hand.join()
    hand.submit("a")
    with monkeypatch.context() as broken:
        broken.setattr(Dispatcher, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hand.done(hand.in_flight()[0])
    hand.lose()
    assert hand.waiting() == ["a"]


def test_a_refused_client_is_told_when_a_tenth_of_the_queue_will_be_committed() -> None:
    """By the tokens that are committed, of which a prompt has none."""
    hand = Hand(draft_len=0, steps_per_batch_max=1, waiting_requests_max=1)
    hand.join(kv_blocks=30)
    hand.submit("runs", length=4, max_new_tokens=100)
    hand.settle()
    for second in range(1, 21):
        hand.now_s = float(second)
        hand.done(hand.in_flight()[0], runs=(1, 1))
    hand.submit("waits", length=20, max_new_tokens=90)
    refused = only(hand.submit("refused"), Reject)
    assert refused.retry_after_s == pytest.approx(0.1 * 90 / 2, rel=0.15)


def test_a_queue_takes_requests_and_tokens_up_to_its_bounds() -> None:
    """A request that is longer than the whole bound comes in when no other waits."""
    hand = Hand(waiting_requests_max=3, waiting_tokens_max=30)
    hand.submit("a", length=4, max_new_tokens=6)
    assert not of_kind(hand.submit("b", length=4, max_new_tokens=16), Reject), "30 in all"
    refused = only(hand.submit("c", length=1, max_new_tokens=1), Reject)
    assert (refused.code, refused.field) == (RejectCode.OVERLOADED, "")
    assert refused.retry_after_s > 0.0, "though nothing is known of the rate"
    hand.cancel("b")
    for name in "cd":
        assert not of_kind(hand.submit(name, length=1, max_new_tokens=1), Reject)
    assert only(hand.submit("e", length=1, max_new_tokens=1), Reject).code is RejectCode.OVERLOADED
    hand = Hand(waiting_tokens_max=30)
    assert not of_kind(hand.submit("long", length=4, max_new_tokens=60), Reject)


@pytest.mark.parametrize(("tokens", "after_s"), [(1, 1.0), (10**6, 60.0)])
def test_a_refused_client_waits_a_second_at_least_and_a_minute_at_most(
    tokens: int, after_s: float
) -> None:
    hand = Hand(draft_len=0, steps_per_batch_max=1, waiting_requests_max=1)
    hand.join(kv_blocks=30)
    hand.submit("runs", length=4, max_new_tokens=100)
    hand.settle()
    hand.now_s = 1.0
    hand.work(5)
    hand.lose(by_batch=False)
    hand.cancel("runs")
    hand.submit("waits", length=4, max_new_tokens=tokens)
    assert only(hand.submit("refused"), Reject).retry_after_s == after_s


def test_a_request_is_served_if_any_replica_can_and_else_refused_as_the_first_does() -> None:
    hand = Hand()
    hand.join("narrow", vocab_size=10)
    hand.join("short", kv_blocks=2)
    assert not of_kind(hand.submit("a", prompt=(500,), max_new_tokens=2), Reject)
    assert not of_kind(hand.submit("b", prompt=(5,), max_new_tokens=50), Reject)
    refused = only(hand.submit("c", prompt=(500,), max_new_tokens=50), Reject)
    assert (refused.code, refused.field) == (RejectCode.INVALID, "prompt")
    assert hand.scheduler.snapshot().serving == 2


def test_outstanding_tokens_are_those_that_are_expected() -> None:
    """Requests that end long before their limits, one after the other, lower what is expected."""
    hand = Hand(draft_len=0, steps_per_batch_max=1)
    hand.join()
    for number in range(200):
        hand.submit(f"r{number}", max_new_tokens=100, stop_token_ids=(7,))
        name = f"r{number}"
        hand.done(hand.settle()[0], **{name: (7,)})
    hand.submit("last", max_new_tokens=100)
    assert hand.scheduler.pool.outstanding_tokens < 10


def test_what_a_request_says_of_its_decoding_is_passed_on_unread_and_extras_are_cut() -> None:
    """Also to the replica that takes it after a loss; extras go where their tokens go."""
    decoding = Decoding(prompt_tokens=1, logprobs=0)
    hand = Hand(draft_len=0, steps_per_batch_max=1)
    hand.join()
    hand.submit("a", decoding=decoding, stop_token_ids=(7,))
    hand.lose()
    hand.join("s")
    (batch,) = hand.in_flight("s")
    assert batch.prefill[0].decoding is decoding
    prompt, five, seven, nine = (TokenLogprobs(-float(n), n) for n in range(1, 5))
    told = hand.tell(StepDone(StepResult(batch.id, "s", (RowResult("a", extras=(prompt,)),))))
    assert only(told, Emit) == Emit("a", 0, (), (prompt,))
    (batch,) = hand.in_flight("s")
    row = RowResult("a", (5, 7, 9), 1, extras=(five, seven, nine))
    told = hand.tell(StepDone(StepResult(batch.id, "s", (row,), steps=1)))
    assert only(told, Emit) == Emit("a", 0, (5, 7), (five, seven))


@pytest.mark.parametrize("stops", [True, False])
def test_each_request_that_ends_by_itself_moves_what_is_expected_by_the_same_share(
    stops: bool,
) -> None:
    """One that its client ends says nothing."""
    hand = Hand(draft_len=0, steps_per_batch_max=1)
    hand.join()
    for number in range(20):
        name = f"r{number}"
        hand.submit(name, max_new_tokens=20, stop_token_ids=(7,))
        (batch,) = hand.settle()
        hand.done(batch, **{name: (1, 1, 1, 1, 7 if stops else 1)})
        hand.cancel(name)
        hand.work()
    share = 0.25 + 0.75 * (1 - REACHED_RECENT) ** 20 if stops else 1.0
    assert hand.scheduler.pool.outstanding_tokens == 0
    assert hand.scheduler.pool.expected_share == pytest.approx(share)
    hand.submit("a", max_new_tokens=50)
    hand.submit("b", max_new_tokens=50)
    assert hand.scheduler.snapshot().outstanding_tokens == math.ceil(100 * share)
    assert hand.scheduler.snapshot().live == 2
    hand.cancel("a")
    assert hand.scheduler.snapshot().live == 1, "though a batch still holds its row"
