"""Proves which batches a replica gets: full ones, no idle replica; and that one of several steps
ends early when a row waits for it. That a cancelled row ends it is shown in test_endings, that
prefill and steps go in turn in test_prefill."""

from __future__ import annotations

from scheduler.messages import Action, Interrupt
from tests.scheduler.hand import Hand, batches_of, of_kind, rows_of


def test_a_replica_gets_no_batch_of_more_rows_than_its_memory_lasts_for() -> None:
    hand = Hand(rows_max=8, draft_len=4)
    hand.join(rows_max=3, draft_len_max=2)
    for name in "abcdefgh":
        hand.submit(name)
    hand.work(30)
    assert max(len(batch.rows) for batch in hand.batches.values()) == 3
    assert {batch.draft_len for batch in hand.batches.values() if batch.rows} == {2}


def test_a_prefill_batch_keeps_its_budget_of_rows_and_tokens() -> None:
    hand = Hand(prefill_tokens_max=9, prefill_rows_max=3)
    for name, length in [("a", 10), ("b", 4), ("c", 6), ("d", 1), ("e", 1), ("f", 1), ("g", 1)]:
        hand.submit(name, length=length)
    first, second = batches_of(hand.join())
    assert rows_of(first) == ["a"]
    assert rows_of(second) == ["b", "c", "d"], "all tokens but the last are filled: 3 + 5 + 0"
    assert batches_of(hand.done(first)) == [], "most of the batch is still being filled"
    steps, third = batches_of(hand.done(second))
    assert rows_of(steps) == ["d", "b", "c", "a"]
    assert rows_of(third) == ["e", "f", "g"]


def test_several_steps_per_batch_only_where_no_other_row_waits() -> None:
    hand = Hand(rows_max=2, steps_per_batch_max=4)
    hand.join()
    hand.submit("a")
    (batch,) = batches_of(hand.work())
    assert batch.steps == 1, "the first token waits for no second one"
    (batch,) = batches_of(hand.done(batch))
    assert batch.steps == 4
    (prefill,) = batches_of(hand.submit("b"))
    assert batches_of(hand.done(batch)) == [], "b is being prefilled: both go together"
    (batch,) = batches_of(hand.done(prefill))
    assert (sorted(rows_of(batch)), batch.steps) == (["a", "b"], 1), "the first one of b"
    (batch,) = batches_of(hand.done(batch))
    assert (sorted(rows_of(batch)), batch.steps) == (["a", "b"], 4)


def test_waiting_requests_that_do_not_fit_do_not_shorten_batches() -> None:
    hand = Hand(steps_per_batch_max=4)
    hand.join(kv_blocks=30)
    hand.submit("a")  # 26 of 30 blocks
    hand.submit("b")
    hand.work()
    (batch,) = batches_of(hand.work())
    assert (rows_of(batch), batch.steps) == (["a"], 4)


def test_each_row_drafts_within_its_own_limits() -> None:
    hand = Hand(draft_len=5)
    hand.submit("free", 3, 100)
    hand.submit("capped", 4, 100, draft_len=2)
    hand.submit("off", 5, 100, draft_len=0)
    hand.submit("short", 6, 3)
    hand.submit("last", 7, 1)
    hand.join()
    (batch,) = hand.settle()
    assert {row.sequence_id: row.draft_len for row in batch.rows} == {
        "free": 5,
        "capped": 2,
        "off": 0,
        "short": 2,
        "last": 0,
    }
    assert batch.draft_len == 5


def interrupts(actions: list[Action]) -> list[int]:
    return [one.batch_id for one in of_kind(actions, Interrupt)]


def stepping(steps: int) -> Hand:
    """With one batch of so many steps of a and b in flight."""
    hand = Hand(steps_per_batch_max=steps)
    hand.join()
    hand.submit("a")
    hand.submit("b")
    while [(batch.steps, len(batch.rows)) for batch in hand.settle()] != [(steps, 2)]:
        hand.work()
    return hand


def test_a_new_request_ends_a_batch_of_several_steps_once_and_one_of_a_single_step_never() -> None:
    hand = stepping(4)
    assert interrupts(hand.submit("c")) == [hand.in_flight()[0].id]
    assert interrupts(hand.cancel("a")) == []
    hand = stepping(1)
    assert interrupts([*hand.submit("c"), *hand.cancel("a")]) == []


def test_what_concerns_another_replica_ends_nothing() -> None:
    hand = stepping(4)
    hand.join("s")
    hand.submit("c")
    assert len(hand.in_flight("r")) + len(hand.in_flight("s")) == 2
    assert interrupts(hand.cancel("c")) == []
