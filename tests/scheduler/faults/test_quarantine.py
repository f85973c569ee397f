"""Proves that a row which breaks batches or replicas is found and fails alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler.faults.quarantine import KILLS_MAX_FACTOR
from scheduler.messages import Batch, BatchKind, FailureRecord, FinishReason, Request, Submit
from tests.scheduler.hand import Hand, rows_of


def crowd(count: int, **config: object) -> Hand:
    """That many rows, filled and stepping on replica r; steps of single tokens."""
    hand = Hand(rows_max=count, draft_len=0, steps_per_batch_max=1, **config)
    hand.join()
    for index in range(count):
        hand.submit(f"q{index}", length=3 + index % 2)
    while [len(batch.rows) for batch in hand.settle()] != [count]:
        hand.work()
    return hand


def play(hand: Hand, breaks: Callable[[Batch], bool], rounds: int = 400) -> list[int]:
    """Answers batches; those that break fail. Their sizes."""
    sizes = []
    for _ in range(rounds):
        batches = [batch for name in hand.replicas() for batch in hand.in_flight(name)]
        if not batches:
            break
        batch = min(batches, key=lambda batch: batch.id)
        if breaks(batch):
            sizes.append(len(batch.rows))
            hand.fail(batch)
        else:
            hand.done(batch)
    return sizes


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


def test_a_token_ends_the_quarantine() -> None:
    hand = crowd(1, failures_max=2)
    for token in range(6):
        hand.fail(hand.settle()[0])
        hand.done(hand.settle()[0], q0=(token,))
    assert "q0" not in hand.finishes


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


def test_a_broken_replica_costs_no_request_while_another_is_sound() -> None:
    hand = crowd(8)
    hand.join("s")
    play(hand, lambda batch: batch.replica_id == "r" and batch.kind is BatchKind.SPECULATE)
    assert len(hand.finishes) == 8
    assert not any(finish.reason is FinishReason.FAILED for finish in hand.finishes.values())


def move(hand: Hand, to: Hand, new: dict[str, int]) -> None:
    """All live requests go on in another pool; a frontend has their tokens and what it was told.

    `new`: how many new tokens each request wants in all.
    """
    live = [name for name in new if name not in hand.finishes]
    for name in live:
        tokens = tuple(hand.tokens.get(name, ()))
        to.records[name] = hand.records.get(name, FailureRecord())
        to.tokens[name] = list(tokens)
        request = Request(name, (1,) * 3, new[name], committed=tokens)
        to.tell(Submit(request, admitted_before=True, record=to.records[name]))
    to.finishes |= hand.finishes


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
