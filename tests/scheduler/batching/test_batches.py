"""Proves which batches a replica gets: full ones, no idle replica; and that one of several steps
ends early when a row waits for it. That a cancelled row ends it is shown in test_endings, that
prefill and steps go in turn in test_prefill."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from scheduler.draft_length.policy import ROUND_TRIP_SHARE
from scheduler.messages import Action, Interrupt, RowResult, StepDone, StepResult, StepTimes
from scheduler.state.replica_record import CAP_GROWTH
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


def test_new_prompts_take_the_places_of_those_that_were_begun_but_for_the_oldest() -> None:
    hand = Hand(prefill_tokens_max=8, prefill_rows_max=3, batches_in_flight_max=1)
    hand.join()
    for name, length in (("oldest", 60), ("begun", 20)):
        hand.submit(name, length=length)
        hand.work()
    for name in ("new", "newer"):
        hand.submit(name, length=2)
    hand.work()
    (batch,) = hand.in_flight()
    assert rows_of(batch) == ["new", "newer", "oldest"], "2 tokens are left, and no place"


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


def test_batches_of_one_step_go_in_turns_where_one_does_not_hold_all_rows() -> None:
    hand = Hand(rows_max=2, steps_per_batch_max=4)
    hand.join()
    for name in "abcd":
        hand.submit(name)
    hand.work(12)
    assert [len(batch.rows) for batch in hand.in_flight()] == [2, 2]
    assert {batch.steps for batch in hand.batches.values()} == {1}


def test_a_far_longer_row_is_left_until_it_is_steps_behind_of_all_rows_in_flight_or_ready() -> None:
    """A third of the six rows steps with each batch: two steps behind is after six batches."""
    hand = Hand(rows_max=2, draft_len=0, steps_per_batch_max=1)
    hand.join(kv_blocks=10_000, context_len=2000)
    for index in range(5):
        hand.submit(f"q{index}", length=10)
    hand.submit("far", length=400)
    hand.settle()
    hand.work(20)
    steps = [rows_of(batch) for batch in hand.batches.values() if batch.rows]
    first, second, *_ = (at for at, rows in enumerate(steps) if "far" in rows)
    assert second - first > 2 * 6 / 2


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
    return [interrupt.batch_id for interrupt in of_kind(actions, Interrupt)]


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


def test_a_replica_that_drains_ends_its_batch_of_several_steps() -> None:
    hand = stepping(4)
    assert interrupts(hand.drain()) == [hand.in_flight()[0].id]
    assert interrupts(stepping(1).drain()) == []


def test_a_batch_of_several_steps_ends_early_where_a_row_in_quarantine_waits_for_it() -> None:
    hand = stepping(4)
    hand.join("s")
    hand.submit("c")
    (batch,) = hand.in_flight("r")
    assert interrupts(hand.lose("s")) == [batch.id]
    hand.done(batch)
    assert [rows_of(batch) for batch in hand.in_flight("r")] == [["c"]]


def test_a_batch_has_the_steps_that_its_own_round_trip_asks_for() -> None:
    """The time beside its run, where nothing else was in flight: 0.7 ms at 10 ms a step."""
    hand = Hand(draft_len=0, steps_per_batch_max=8)
    hand.join(kv_blocks=10_000)

    def answer(passed_s: float) -> None:
        """The oldest batch in flight, after so much time."""
        hand.now_s += passed_s
        batch = hand.in_flight()[0]
        steps = 1 if batch.rows else 0
        rows = tuple(RowResult(name, (1,) * steps, steps) for name in rows_of(batch))
        times = StepTimes(verify_s=10e-3, total_s=10e-3)
        hand.tell(StepDone(StepResult(batch.id, "r", rows, steps, times)))

    hand.submit("a", max_new_tokens=400)
    answer(5.0)
    for _ in range(6):
        answer(10.7e-3)
    wanted = math.ceil(0.7e-3 / (ROUND_TRIP_SHARE * 10e-3))
    assert [batch.steps for batch in hand.in_flight()] == [wanted]
    hand.submit("b", max_new_tokens=400)
    answer(10.7e-3)
    answer(10e-3)  # it was sent while the other one ran: this is no round trip of nothing
    for _ in range(3):
        answer(10.7e-3)
    assert [batch.steps for batch in hand.in_flight()] == [wanted]


def test_what_concerns_another_replica_ends_nothing() -> None:
    hand = stepping(4)
    hand.join("s")
    hand.submit("c")
    assert len(hand.in_flight("r")) + len(hand.in_flight("s")) == 2
    assert interrupts(hand.cancel("c")) == []


KINDS = st.sampled_from(["submit", "work", "work", "work", "cancel", "fail"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(KINDS, st.integers(1, 60), st.integers(1, 40)), min_size=5, max_size=60),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, 4),
)
def test_every_batch_is_within_its_bounds_and_its_rows_have_just_the_blocks_that_they_need(
    events: list[tuple[str, int, int]], kv_reserve: float, rows_max: int
) -> None:
    hand = Hand(
        kv_reserve=kv_reserve,
        rows_max=rows_max,
        prefill_rows_max=3,
        prefill_tokens_max=20,
        draft_len=2,
        failures_max=9,
    )
    hand.join(kv_blocks=40)
    owned: dict[str, int] = {}
    asked: set[int] = set()
    for number, (kind, length, new) in enumerate(events):
        actions = []
        flights = hand.in_flight()
        if kind == "submit" or not hand.sequences():
            actions = hand.submit(f"q{number}", length, new)
        elif kind == "cancel":
            actions = hand.cancel(hand.sequences()[length % len(hand.sequences())].id)
        elif flights:
            actions = hand.done(flights[0]) if kind == "work" else hand.fail(flights[0])
        by_id = {sequence.id: sequence for sequence in hand.sequences()}
        for batch_id in interrupts(actions):
            assert hand.batches[batch_id].steps > 1
            assert batch_id not in asked, "asked twice"
            asked.add(batch_id)
        for batch in batches_of(actions):
            filled = sum(row.end - row.begin for row in batch.prefill)
            alone = any(by_id[name].quarantined for name in rows_of(batch))
            assert filled <= 20 or (alone and len(batch.prefill) == 1)
            assert len(batch.prefill) <= 3
            assert len(batch.rows) <= rows_max
            for row in batch.prefill:
                owned[row.sequence_id] = row.blocks
                if not row.begin:
                    one = by_id[row.sequence_id]
                    share = 1.0 if one.preempted else kv_reserve
                    reserved = one.length + math.ceil(share * one.tokens_left)
                    assert row.blocks == -(-reserved // 4)
            for row in batch.rows:
                one = by_id[row.sequence_id]
                ahead = batch.steps * (batch.draft_len + 1)
                needed = -(-min(row.length + ahead, one.length_max) // 4)
                assert row.blocks == max(needed, owned[one.id])
                assert row.draft_len == min(2, one.tokens_left - 1)
                owned[one.id] = row.blocks
            lengths = [row.length for row in batch.rows]
            assert lengths == sorted(lengths)
            assert batch.draft_len == max([row.draft_len for row in batch.rows], default=0)


def test_after_a_batch_that_was_too_large_larger_ones_are_tried_again_little_by_little() -> None:
    hand = Hand(rows_max=8, draft_len=0, steps_per_batch_max=1)
    hand.join(kv_blocks=10_000)
    for index in range(8):
        hand.submit(f"q{index}", max_new_tokens=400)
    while [len(batch.rows) for batch in hand.settle()] != [8]:
        hand.work()
    hand.fail(hand.in_flight()[0])
    sizes = []
    for _ in range(250):
        sizes.append(len(hand.in_flight()[0].rows))
        hand.work()
    firsts = [sizes.index(size) for size in (5, 6, 7, 8)]
    assert firsts == sorted(firsts)
    assert set(sizes[: firsts[0]]) <= {1, 2, 3, 4}
    # A cap of n rows has grown to n + 1 after so many batches as large as it.
    assert firsts[0] >= math.log(5 / 4) / math.log(CAP_GROWTH)
    for size, (first, then) in zip((5, 6, 7), pairwise(firsts), strict=True):
        full = sum(part >= size for part in sizes[first:then])
        wanted = math.log((size + 1) / size) / math.log(CAP_GROWTH)
        assert full == pytest.approx(wanted, abs=2)


@pytest.mark.parametrize(("kv_blocks", "steps"), [(12, 4), (11, 1)])
def test_a_batch_has_several_steps_if_the_blocks_just_last_for_them(
    kv_blocks: int, steps: int
) -> None:
    """Two rows of 4 tokens have 2 blocks each, and need 6 each for four steps of 5 tokens."""
    hand = Hand(kv_reserve=0.0, draft_len=4, steps_per_batch_max=4)
    for name in "ab":
        hand.submit(name, length=3, max_new_tokens=30)
    hand.join(kv_blocks=kv_blocks)
    (batch,) = hand.settle()
    assert [row.blocks for row in batch.rows] == [2, 2]
    hand.done(batch)
    (batch,) = hand.in_flight()
    assert batch.steps == steps
    assert hand.scheduler.snapshot().preempted == 0
