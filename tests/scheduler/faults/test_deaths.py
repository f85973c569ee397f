"""Proves that a row which kills replicas is found and fails alone."""

from __future__ import annotations

import pytest

from scheduler.faults.quarantine import KILLS_MAX_FACTOR
from scheduler.messages import FinishReason
from tests.scheduler.faults.crowd import crowd, move
from tests.scheduler.hand import Hand, rows_of


def test_of_a_replica_that_dies_all_rows_run_in_batches_of_the_root_of_their_number() -> None:
    """After a second death alone."""
    hand = Hand(rows_max=16, draft_len=0, steps_per_batch_max=1, failures_max=4)
    hand.join("r0")
    for index in range(16):
        hand.submit(f"q{index}", length=4)
    while [len(batch.rows) for batch in hand.settle("r0")] != [16]:
        hand.work(1, "r0")
    hand.lose("r0")
    assert {record.rows_limit for record in hand.records.values()} == {4}
    assert {
        (sequence.record.failures, sequence.record.deaths) for sequence in hand.sequences()
    } == {(1, 1)}
    hand.join("r1")
    (batch,) = hand.in_flight("r1")
    assert len(rows_of(batch)) == 4
    hand.lose("r1")
    again = [hand.records[name] for name in rows_of(batch)]
    assert [(sequence.rows_limit, sequence.deaths, sequence.kills) for sequence in again] == [
        (1, 2, 0)
    ] * 4
    hand.join("r2")
    (batch,) = hand.in_flight("r2")
    assert len(rows_of(batch)) == 1
    hand.lose("r2")
    (name,) = rows_of(batch)
    assert hand.records[name].kills == 1, "the first death with nothing beside it"


@pytest.mark.parametrize(("steps", "draft_len", "lost"), [(1, 1, 0), (4, 0, 4), (4, 1, 8)])
def test_of_a_row_whose_replica_dies_the_first_token_beyond_those_in_flight_clears_it(
    steps: int, draft_len: int, lost: int
) -> None:
    """The tokens of a batch of several steps have died with it, each with its draft."""
    hand = Hand(draft_len=draft_len, steps_per_batch_max=steps)
    hand.join()
    hand.submit("a", max_new_tokens=400)
    hand.settle()
    hand.work(2)
    (batch,) = hand.in_flight()
    assert (batch.steps, batch.draft_len) == (steps, draft_len)
    hand.lose()
    hand.join("s")
    tokens = 0
    while hand.sequences()[0].quarantined:
        hand.done(hand.settle("s")[0])
        tokens += 1
    assert tokens == lost + 1


@pytest.mark.parametrize("by_batch", [True, False])
def test_rows_of_both_batches_go_into_quarantine_but_not_if_their_replica_left_by_itself(
    by_batch: bool,
) -> None:
    """Also of the one queued second: the result of the first may have died with the replica."""
    hand = Hand(rows_max=2, draft_len=0)
    hand.join()
    for name in "abcd":
        hand.submit(name)
    hand.settle()
    first, second = hand.in_flight()
    hand.lose(by_batch=by_batch)
    hand.join("s")
    quarantined = {sequence.id for sequence in hand.sequences() if sequence.quarantined}
    failed = {sequence.id for sequence in hand.sequences() if sequence.record.failures}
    due = {*rows_of(first), *rows_of(second)} if by_batch else set()
    assert quarantined == failed == due
    assert bool(hand.records) == by_batch


def test_a_request_that_was_cancelled_takes_no_part_in_the_death_of_its_replica() -> None:
    hand = crowd(1, failures_max=1)
    hand.cancel("q0")
    assert hand.in_flight(), "its batch runs still"
    assert hand.lose() == []
    assert hand.finishes["q0"].reason is FinishReason.CANCELLED
    assert not hand.records


def test_each_death_after_the_first_keeps_a_row_four_tokens_longer_in_quarantine() -> None:
    hand, name = crowd(1, failures_max=9), "r"
    cleared_after = []
    for death in range(4):
        hand.lose(name)
        name = f"r{death}"
        hand.join(name)
        tokens = 0
        while hand.sequences()[0].quarantined:
            hand.done(hand.settle(name)[0])
            tokens += 1
        cleared_after.append(tokens)
    assert cleared_after == [1, 5, 9, 13]


def test_a_row_that_kills_again_and_again_fails_even_if_it_commits_between() -> None:
    hand = Hand(failures_max=2, draft_len=0, steps_per_batch_max=1)
    name = "r0"
    hand.join(name)
    for row_id in ("a", "b", "c"):
        hand.submit(row_id, max_new_tokens=400)
    deaths = rounds = 0
    while "a" not in hand.finishes:
        rounds += 1
        batch = hand.in_flight(name)[0]
        # It kills at every fifth token of its content.
        row = next((row for row in batch.rows if row.sequence_id == "a"), None)
        if row is not None and row.length % 5 == 0 and rounds % 3:
            deaths += 1
            hand.lose(name)
            name = f"r{deaths}"
            hand.join(name)
        else:
            hand.done(batch)
        assert rounds < 1000
    assert hand.finishes["a"].reason is FinishReason.FAILED
    assert set(hand.finishes) == {"a"}, "the others live"
    assert deaths <= 12


def test_a_row_that_kills_alone_again_and_again_fails_though_it_goes_on_between() -> None:
    hand, deaths = crowd(1, failures_max=2), 0
    while "q0" not in hand.finishes:
        hand.lose(f"r{deaths}" if deaths else "r")
        deaths += 1
        hand.join(f"r{deaths}")
        for batch in hand.settle(f"r{deaths}"):
            hand.done(batch)
    assert hand.finishes["q0"].reason is FinishReason.FAILED
    assert deaths == KILLS_MAX_FACTOR * 2


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("steps", [1, 16])
@pytest.mark.parametrize("companions", [0, 15])
def test_a_deadly_row_is_known_after_three_deaths(steps: int, companions: int, moves: bool) -> None:
    """Whether it kills at once or at one place, also of a batch of several steps, whose tokens die
    with it. `moves`: with each death all that lives goes to a new pool, which knows what the last
    one has said."""
    for place in (0, *range(20, 20 + steps)):
        names = ["poison", *(f"q{index}" for index in range(companions))]
        new = dict.fromkeys(names, 60)

        def pool(steps: int = steps) -> Hand:
            return Hand(rows_max=8, draft_len=0, steps_per_batch_max=steps, failures_max=3)

        hand = pool()
        move(Hand(), hand, new)
        hand.join("r0")
        deaths = 0
        while batches := hand.in_flight(f"r{deaths}"):
            batch = batches[0]
            row = next((row for row in batch.rows if row.sequence_id == "poison"), None)
            if row is not None and row.length + batch.steps > place:
                hand.lose(f"r{deaths}")
                deaths += 1
                assert deaths <= 3
                if moves:
                    before, hand = hand, pool()
                    move(before, hand, new)
                hand.join(f"r{deaths}")
                continue
            hand.done(batch, **{row.sequence_id: (1,) * batch.steps for row in batch.rows})
        assert deaths == 3
        failed = [name for name, end in hand.finishes.items() if end.reason is FinishReason.FAILED]
        assert failed == ["poison"]
        assert "3 in all" in hand.finishes["poison"].message
        assert len(hand.finishes) == companions + 1


def test_what_came_since_the_last_word_clears_a_request_in_another_pool_as_in_its_own() -> None:
    def twice_lost() -> Hand:
        hand = crowd(1, failures_max=3)
        for name in ("r", "s"):
            hand.settle(name)
            hand.lose(name)
            hand.join("s" if name == "r" else "t")
        return hand

    for tokens in range(8):
        hand = twice_lost()
        for _ in range(tokens):
            hand.done(hand.settle("t")[0])
        after = Hand()
        move(hand, after, {"q0": 100})
        (moved,), (stayed,) = after.sequences(), hand.sequences()
        for name in ("failures", "deaths", "kills", "rows_limit"):
            assert getattr(moved.record, name) == getattr(stayed.record, name), (tokens, name)
        assert (moved.record.failures == 0) == (tokens > 0)
