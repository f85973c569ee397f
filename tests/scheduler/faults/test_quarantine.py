"""Proves that a row which breaks batches is found and fails alone. Of rows that kill replicas it is
shown in test_deaths."""

from __future__ import annotations

import pytest

from scheduler.messages import BatchKind, FinishReason
from tests.scheduler.faults.crowd import crowd, move, play
from tests.scheduler.hand import Hand, rows_of


def test_a_batch_that_is_too_large_is_halved_until_it_fits_and_not_tried_again_at_once() -> None:
    hand = crowd(8)
    hand.fail(hand.in_flight()[0])
    (half,) = hand.in_flight()
    assert half.kind is BatchKind.SPECULATE, "nothing is prefilled again"
    assert len(half.rows) == 4
    sizes = play(hand, lambda batch: len(batch.rows) > 3, rounds=200)
    assert sizes[0] == 4
    assert len(sizes) <= 5, sizes
    assert not any(finish.reason is FinishReason.FAILED for finish in hand.finishes.values())
    assert all(hand.tokens.get(f"q{index}") for index in range(8)), "some rows made no progress"


def test_a_row_that_breaks_every_batch_fails_alone() -> None:
    hand = crowd(8, failures_max=3)
    sizes = play(hand, lambda batch: "q5" in [row.sequence_id for row in batch.rows])
    assert sizes == [8, 4, 2, 1, 1, 1]
    assert hand.finishes["q5"].reason is FinishReason.FAILED
    others = [finish for name, finish in hand.finishes.items() if name != "q5"]
    assert all(finish.reason is FinishReason.LENGTH for finish in others)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_rows_of_a_failed_batch_run_in_batches_of_half_as_many_wherever_they_go(count: int) -> None:
    """Also on a replica that no batch has failed on, and in another pool. One by itself runs by
    itself."""
    hand = crowd(count)
    hand.fail(hand.in_flight()[0])
    hand.join("s")
    hand.drain("r")
    half = max(count // 2, 1)
    assert {hand.records[f"q{index}"].rows_limit for index in range(count)} == {half}
    for _ in range(60):
        for batch in hand.in_flight("s"):
            assert len(rows_of(batch)) <= half or not hand.scheduler.pool.replicas["s"].quarantined
        hand.work(1, "r", "s")
    assert not hand.waiting()
    after = Hand(rows_max=count)
    move(hand, after, dict.fromkeys((f"q{index}" for index in range(count)), 100))
    moved = [sequence for sequence in after.sequences() if sequence.quarantined]
    assert all(sequence.record.rows_limit == half for sequence in moved)


def test_rows_in_quarantine_and_those_between_them_take_single_steps() -> None:
    """So each batch shows at once whether the replica works, and for which row."""
    hand = Hand(rows_max=4, draft_len=0, steps_per_batch_max=4)
    hand.join()
    for index in range(4):
        hand.submit(f"q{index}", max_new_tokens=200)
    while [len(batch.rows) for batch in hand.settle()] != [4]:
        hand.work()
    hand.work(2)
    assert hand.in_flight()[0].steps == 4
    hand.fail(hand.in_flight()[0])
    singles = 0
    while any(sequence.quarantined for sequence in hand.sequences()) and singles < 9:
        singles += 1
        assert [batch.steps for batch in hand.in_flight()] == [1]
        hand.work()
    assert 2 <= singles < 9


@pytest.mark.parametrize(("less", "rows"), [(0, 3), (1, 2)])
def test_rows_in_quarantine_are_filled_within_the_tokens_of_a_prefill_batch(
    less: int, rows: int
) -> None:
    """Three may come: if their tokens just fill it, and not with one token more."""
    hand = crowd(9)
    hand.lose()
    names = [f"q{index}" for index in range(9)]
    tokens = sum(3 + len(hand.tokens.get(name, ())) - 1 for name in names[:3])
    after = Hand(prefill_tokens_max=tokens - less)
    move(hand, after, dict.fromkeys(names, 100))
    after.join()
    (batch,) = after.in_flight()
    assert {after.records[name].rows_limit for name in rows_of(batch)} == {3}
    assert rows_of(batch) == names[:rows]


def test_rows_in_quarantine_go_in_the_order_of_their_arrival_where_they_fit() -> None:
    """None passes one before it that has no room yet; one that the replica never has room for
    stays behind."""
    hand = Hand(rows_max=16, draft_len=0, steps_per_batch_max=1)
    hand.join("r", kv_blocks=200)
    asked = {"large": 200, "a": 20, "b": 60, "c": 4}
    for name, new in (*asked.items(), *((f"q{index}", 4) for index in range(12))):
        hand.submit(name, length=4, max_new_tokens=new)
    while [len(batch.rows) for batch in hand.settle("r")] != [16]:
        hand.work(1, "r")
    hand.lose("r")
    assert hand.waiting()[:4] == ["large", "a", "b", "c"]
    hand.join("s", kv_blocks=20)
    (batch,) = hand.in_flight("s")
    assert rows_of(batch) == ["a"], "b takes 16 blocks of the 14 that are left"
    hand.join("t", kv_blocks=100)
    assert [rows_of(batch)[0] for batch in hand.in_flight("t")] == ["large"]


def test_the_first_row_in_quarantine_reserves_a_replica_that_others_run_on() -> None:
    hand = crowd(4)
    hand.join("s")
    hand.submit("a")
    hand.submit("b")
    hand.lose("s")
    assert hand.waiting() == ["a", "b"]
    assert hand.replica().reserved_for == "a"


def test_no_row_waits_long_for_a_prefill_that_failed_once() -> None:
    """The rows that run show that steps succeed; a prefill they cannot show."""
    hand = crowd(3)
    for name in ("broken", "next", "last"):
        hand.submit(name, length=8)
    while "broken" not in rows_of(hand.in_flight()[0]):
        hand.work()
    hand.fail(hand.in_flight()[0])
    hand.work(30)
    assert not hand.waiting()
    assert len(hand.in_flight()) == 2, "a batch is prepared beside the running one again"


@pytest.mark.parametrize(("comes", "most"), [({1: 8, 2: 8, 3: 8}, 3), ({1: 200}, 4)])
def test_a_prompt_that_breaks_every_prefill_lets_the_others_pass_and_fails_after_three(
    comes: dict[int, int], most: int
) -> None:
    """Theirs show that it is the prompt and not the replica; so do the chunks of one long prompt.
    `comes`: with which failure a prompt of which length comes."""
    hand = crowd(4, prefill_tokens_max=16)
    hand.submit("broken", length=8)
    failures = 0
    while "broken" not in hand.finishes:
        batch = hand.in_flight()[0]
        if batch.kind is BatchKind.PREFILL and "broken" in rows_of(batch):
            failures += 1
            if failures in comes:
                hand.submit(f"next{failures}", length=comes[failures])
            hand.fail(batch)
        else:
            hand.done(batch)
    assert hand.finishes["broken"].reason is FinishReason.FAILED
    assert 3 <= failures <= most


def test_other_rows_step_between_any_two_batches_of_rows_in_quarantine() -> None:
    hand = crowd(4)
    hand.join("s")
    for index in range(12):
        hand.submit(f"s{index}", max_new_tokens=8)
    hand.settle("s")
    hand.lose("s")
    alone: list[bool] = []
    while hand.waiting():
        alone.append(hand.replica().pipeline.quarantined)
        assert alone[-2:] != [True, True]
        hand.work()
    assert 4 <= sum(alone) < len(alone) <= 60, "they come in, in turns with the others"


def test_a_prompt_is_filled_beside_the_first_step_after_the_last_row_in_quarantine() -> None:
    hand = crowd(2)
    hand.fail(hand.in_flight()[0])
    hand.submit("new", length=8)
    while any(sequence.quarantined for sequence in hand.sequences()):
        assert len(hand.in_flight()) == 1
        hand.work()
    step, prefill = hand.in_flight()
    assert (step.kind, rows_of(prefill)) == (BatchKind.SPECULATE, ["new"])


def test_a_row_in_quarantine_that_has_no_room_yet_stops_no_batch_of_the_others() -> None:
    """Two of them are in flight, as ever."""
    hand = Hand(rows_max=2, draft_len=0, steps_per_batch_max=1)
    hand.join(kv_blocks=28)
    for name in "abcd":
        hand.submit(name, length=4, max_new_tokens=20)
    hand.work(4)
    hand.join("s")
    hand.submit("large", length=4, max_new_tokens=60)
    hand.lose("s")
    assert hand.sequences()[-1].quarantined
    hand.work(4)
    assert hand.replica().reserved_for == "large"
    assert len(hand.in_flight()) == 2


@pytest.mark.parametrize(("context_len", "goes"), [(512, "s"), (50, "r")])
def test_a_row_that_failed_alone_goes_to_another_replica_if_one_could_hold_it(
    context_len: int, goes: str
) -> None:
    hand = crowd(1)
    hand.join("s", context_len=context_len)
    hand.fail(hand.in_flight()[0])
    assert [name for name in "rs" if hand.in_flight(name)] == [goes]


@pytest.mark.parametrize("goes_on", [True, False])
def test_it_may_come_back_to_that_replica_once_it_has_gone_on_elsewhere(goes_on: bool) -> None:
    hand = crowd(1)
    hand.join("s")
    hand.fail(hand.in_flight()[0])
    if goes_on:
        hand.work(2, "s")
    hand.join("t")
    hand.drain("s")
    hand.work(1, "s")
    assert [name for name in "rt" if hand.in_flight(name)] == ["r" if goes_on else "t"]


def test_where_it_failed_before_it_went_on_counts_no_more_when_it_fails_again() -> None:
    hand = crowd(1)
    hand.join("s")
    hand.fail(hand.in_flight()[0])
    hand.work(2, "s")
    assert not any(sequence.quarantined for sequence in hand.sequences())
    hand.join("t")
    hand.fail(hand.in_flight("s")[0])
    assert [name for name in "rst" if hand.in_flight(name)] == ["r"]


def test_a_token_ends_the_quarantine() -> None:
    hand = crowd(1, failures_max=2)
    for token in range(6):
        hand.fail(hand.settle()[0])
        hand.done(hand.settle()[0], q0=(token,))
    assert "q0" not in hand.finishes


def test_a_broken_replica_costs_no_request_while_another_is_sound() -> None:
    hand = crowd(8)
    hand.join("s")
    play(hand, lambda batch: batch.replica_id == "r" and batch.kind is BatchKind.SPECULATE)
    assert len(hand.finishes) == 8
    assert not any(finish.reason is FinishReason.FAILED for finish in hand.finishes.values())


def test_a_row_that_waits_where_it_failed_goes_elsewhere_once_there_is_room() -> None:
    """The other replica is full at first, and never idle."""
    hand = Hand(rows_max=1, residents_max=3, batches_in_flight_max=2, steps_per_batch_max=1)
    hand.join("broken")
    hand.submit("beside")
    hand.settle("broken")
    hand.submit("failed")
    hand.join("sound")
    for name in ("one", "two", "three"):
        hand.submit(name)
    hand.work(6, "sound")
    (batch,) = (batch for batch in hand.in_flight("broken") if rows_of(batch) == ["failed"])
    hand.fail(batch)
    assert hand.replica("broken").reserved_for == "failed"
    hand.cancel("one")
    hand.work(4, "broken", "sound")
    assert "failed" in hand.replica("sound").residents
