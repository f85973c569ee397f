"""Proves that a replica may come, drain, fail or vanish at any moment and no request is lost.

Late, doubled and unknown events change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest

from scheduler.messages import (
    Dispatch,
    Emit,
    Finish,
    FinishReason,
    Priority,
    Reject,
    RejectCode,
    ReplicaJoined,
    ReplicaSpec,
    Request,
    StepDone,
    StepFailed,
    StepResult,
    Submit,
)
from tests.scheduler.hand import Hand, batches_of, of_kind, only, released, rows_of


def test_with_a_replica_known_the_same_is_refused_at_the_door() -> None:
    hand = Hand()
    hand.join()
    assert only(hand.submit("a", prompt=(5000,)), Reject).field == "prompt"
    hand.join("large", context_len=5000, kv_blocks=5000)
    assert only(hand.submit("b", 400, 400), Dispatch).batch.replica_id == "large"


@pytest.mark.parametrize("committed", [(), (1, 1)])
@pytest.mark.parametrize("back", list(permutations(["small", "large", "submit"])))
def test_one_that_was_accepted_is_served_whichever_replica_comes_back_first(
    back: tuple[str, ...], committed: tuple[int, ...]
) -> None:
    """As after a restart of the pool. By the smaller one it would be refused."""
    hand = Hand()
    for event in back:
        if event == "submit":
            request = Request("a", (1,) * 40, 40, committed=committed)
            actions = hand.tell(Submit(request, admitted_before=True, validated=True))
            assert not of_kind(actions, Reject)
        else:
            hand.join(event, kv_blocks=10 if event == "small" else 100)
    assert not hand.finishes
    assert [rows_of(batch) for batch in hand.in_flight("large")] == [["a"]]


def test_one_that_no_pool_has_checked_is_refused_by_the_replicas_there_are_or_the_first() -> None:
    """It was sent to a pool that went before it said whether one can serve it, or waits."""
    submit = Submit(Request("a", (1,) * 40, 40, committed=(1, 1)), admitted_before=True)
    hand = Hand()
    hand.join("small", kv_blocks=10)
    assert only(hand.tell(submit), Reject).field == "max_new_tokens"
    hand = Hand()
    hand.tell(submit)
    hand.submit("b", prompt=(1, 5000), max_new_tokens=9)
    hand.submit("c", max_new_tokens=9)
    hand.join("small", kv_blocks=10)
    assert [hand.finishes[name].reason for name in "ab"] == [FinishReason.FAILED] * 2
    assert hand.finishes["b"].message.startswith("prompt: ")
    assert [rows_of(batch) for batch in hand.in_flight("small")] == [["c"]]


@pytest.mark.parametrize("validated", [False, True])
def test_what_the_settings_refuse_is_refused_before_a_replica_is_known(validated: bool) -> None:
    """Whatever another pool said, whose settings may have been others."""
    hand = Hand(timeout_s_max=60.0)
    asked = Request("a", (1,), 9, timeout_s=61.0)
    assert only(hand.tell(Submit(asked, validated=validated)), Reject).field == "timeout_s"


def test_those_behind_one_that_was_validated_are_validated_all_the_same() -> None:
    hand = Hand()
    hand.tell(Submit(Request("a", (1,) * 40, 40), admitted_before=True, validated=True))
    hand.submit("b", prompt=(1, 5000), max_new_tokens=9)
    hand.join("small", kv_blocks=10)
    assert set(hand.finishes) == {"b"}
    assert hand.waiting() == ["a"], "a larger one may come"


def test_what_one_replica_could_serve_waits_for_one_like_it_where_a_smaller_one_follows() -> None:
    hand = Hand()
    hand.submit("a", prompt=(1,) * 40, max_new_tokens=40)
    hand.join("large")
    hand.lose("large", by_batch=False)
    hand.join("small", kv_blocks=10)
    assert hand.waiting() == ["a"]
    assert not hand.finishes


def test_an_id_that_is_live_is_taken_until_its_batch_has_ended() -> None:
    hand = Hand()
    hand.submit("a")
    assert only(hand.submit("a"), Reject).code is RejectCode.DUPLICATE
    hand.join()
    (batch,) = hand.in_flight()
    hand.cancel("a")
    assert only(hand.submit("a"), Reject).code is RejectCode.DUPLICATE
    hand.done(batch)
    assert only(hand.submit("a"), Dispatch).batch.prefill[0].sequence_id == "a"


def test_a_draining_replica_hands_back_its_residents_and_takes_none() -> None:
    hand = Hand(rows_max=2, batches_in_flight_max=1)
    hand.join("one")
    for name in "abc":
        hand.submit(name)
    (batch,) = hand.settle("one")
    while len(rows_of(batch)) != 2:
        hand.done(batch)
        (batch,) = hand.settle("one")
    actions = hand.drain("one")
    (ready,) = {"a", "b", "c"} - set(rows_of(batch))
    assert released(actions) == [ready], "rows in flight stay until their batch ends"
    assert hand.drain("one") == []
    assert hand.submit("d") == []
    actions = hand.done(batch)
    assert {emit.request_id for emit in of_kind(actions, Emit)} == set(rows_of(batch))
    assert sorted(released(actions)) == sorted(rows_of(batch))
    assert batches_of(actions) == []
    assert hand.used("one") == 0
    assert sorted(hand.waiting()) == ["a", "b", "c", "d"]
    (batch,) = batches_of(hand.join("two"))
    assert sorted(rows_of(batch)) == ["a", "b", "c", "d"]


def test_a_draining_replica_hands_back_the_rows_of_a_batch_that_fails() -> None:
    hand = Hand(draft_len=0)
    for name in "ab":
        hand.submit(name)
    hand.join()
    (batch,) = hand.settle()
    hand.drain()
    assert sorted(released(hand.fail(batch))) == ["a", "b"]
    assert hand.waiting() == ["a", "b"]


@pytest.mark.parametrize("gone", [Hand.lose, Hand.drain])
def test_one_that_lost_its_place_goes_before_those_of_any_class(
    gone: Callable[[Hand], None],
) -> None:
    """A client may be reading its stream already."""
    hand = Hand(residents_max=1)
    hand.join()
    hand.submit("served", priority=Priority.LOW)
    hand.submit("waits", priority=Priority.HIGH)
    gone(hand)
    hand.work()
    assert hand.waiting() == ["served", "waits"]


def test_a_request_whose_batches_always_fail_is_failed_with_the_message() -> None:
    hand = Hand(failures_max=3)
    hand.join()
    hand.submit("a")
    for _ in range(2):
        hand.fail(hand.in_flight()[0])
        assert not hand.finishes
    actions = hand.fail(hand.in_flight()[0], "no luck")
    finish = only(actions, Finish)
    assert (finish.reason, finish.message) == (FinishReason.FAILED, "no luck")
    assert released(actions) == ["a"]
    assert hand.used() == 0


def test_events_that_are_late_doubled_or_unknown_change_nothing() -> None:
    hand = Hand()
    hand.join()
    hand.submit("a")
    (prefill,) = hand.in_flight()
    hand.done(prefill)
    before = hand.scheduler.snapshot()
    (batch,) = hand.in_flight()
    assert hand.done(prefill) == []
    assert hand.fail(prefill) == []
    assert hand.tell(StepDone(StepResult(99, "r", ()))) == []
    assert hand.tell(StepDone(StepResult(batch.id, "elsewhere", ()))) == []
    assert hand.tell(StepFailed("elsewhere", batch.id, "")) == []
    assert hand.cancel("nobody") == []
    assert hand.drain("elsewhere") == []
    assert hand.lose("elsewhere") == []
    assert hand.tell(ReplicaJoined("r", ReplicaSpec(1, 1, 1, 1))) == []
    assert hand.scheduler.snapshot() == before
    assert only(hand.done(batch, a=(5,)), Emit).tokens == (5,)
    assert hand.done(batch, a=(5,)) == [], "a result that arrives twice"


def test_the_snapshot_says_who_is_where() -> None:
    hand = Hand(draft_len=3, residents_max=2)
    hand.join("one")
    for name, length in [("a", 2), ("b", 6), ("c", 3)]:
        hand.submit(name, length, 10)
    while not hand.tokens:
        hand.work(1, "one")
    status = hand.scheduler.snapshot()
    (one,) = status.replicas
    assert (status.waiting, status.live, one.residents) == (1, 3, 2)
    assert (one.kv_blocks_used, one.spec.kv_blocks) == (3 + 4, 1000)
    assert one.figures.committed_tokens == sum(len(tokens) for tokens in hand.tokens.values())
    for name in "abc":
        hand.cancel(name)
    assert hand.scheduler.snapshot().finished[FinishReason.CANCELLED] == 3
    assert hand.scheduler.snapshot().live == 0
