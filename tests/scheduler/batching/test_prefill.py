"""Proves that long prompts are filled in chunks between steps, and that no row waits for long."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from benchmarks.shared.linear import LinearCost
from scheduler.batching.prefill import chunks_of_begun, first_half, oldest_partial
from scheduler.decoding import Decoding
from scheduler.messages import Batch, BatchKind, ReplicaSpec, Request
from scheduler.state import ReplicaRecord, Sequence
from tests.scheduler.draft_length.pair import Pair, prefill as tried_prefill
from tests.scheduler.hand import Hand, batches_of, released, rows_of


def spans(batch: Batch) -> dict[str, tuple[int, int | None]]:
    return {row.sequence_id: (row.begin, row.until) for row in batch.prefill}


def prefills(hand: Hand) -> list[Batch]:
    return [batch for batch in hand.batches.values() if batch.kind is BatchKind.PREFILL]


def test_a_long_prompt_is_filled_in_chunks_and_its_content_is_sent_once() -> None:
    hand = Hand(prefill_tokens_max=10)
    hand.join()
    decoding = Decoding(prompt_tokens=1)
    hand.submit("a", length=26, cache_salt="x", decoding=decoding)
    hand.work(3)
    assert [spans(batch)["a"] for batch in prefills(hand)] == [(0, 10), (10, 20), (20, 25)]
    rows = [batch.prefill[0] for batch in prefills(hand)]
    assert [len(row.tokens) for row in rows] == [26, 0, 0]
    assert ["x" in row.salt for row in rows] == [True, False, False]
    assert [row.decoding for row in rows] == [decoding, None, None]
    (batch,) = hand.in_flight()
    assert (batch.kind, batch.rows[0].length) == (BatchKind.SPECULATE, 26)


def test_running_rows_step_between_two_prefills_of_one_prompt_or_of_several() -> None:
    hand = Hand(prefill_tokens_max=10, prefill_rows_max=1, rows_max=2)
    hand.join()
    hand.submit("a")
    hand.work(3)
    for index in range(10):
        hand.submit(str(index))
    hand.submit("long", length=101)
    hand.work(50)
    kinds = [batch.kind for batch in hand.batches.values()][1:]
    assert len(prefills(hand)) == 21
    assert all(str(index) in hand.tokens for index in range(10)), "a row starved"
    assert (BatchKind.PREFILL, BatchKind.PREFILL) not in itertools.pairwise(kinds)
    stepped = [batch for batch in hand.batches.values() if batch.rows]
    assert len(rows_of(stepped[-1])) == 2, "the long one steps with the other in the end"


def test_a_short_prompt_passes_a_long_one_that_is_being_filled() -> None:
    hand = Hand(prefill_tokens_max=10)
    hand.join()
    hand.submit("long", length=201)
    hand.submit("short", length=6)
    assert spans(prefills(hand)[1]) == {"short": (0, 5)}, "behind the first chunk"
    hand.work(2)
    hand.submit("later", length=6)
    hand.work(2)
    first = next(batch for batch in prefills(hand) if "later" in rows_of(batch))
    assert spans(first)["later"] == (0, 5)
    begin, until = spans(first)["long"]
    assert until is not None
    assert until - begin == 5, "the long one has its half all the same"


def test_the_oldest_has_at_least_half_of_every_batch_whatever_comes() -> None:
    hand = Hand(prefill_tokens_max=8, prefill_rows_max=4, rows_max=64)
    hand.join(kv_blocks=10_000)
    hand.submit("long", length=81, max_new_tokens=400)
    for index in range(120):
        hand.submit(str(index), length=5, max_new_tokens=400)
        hand.work()
    batches = [batch for batch in prefills(hand) if "long" in rows_of(batch)]
    assert sum(spans(batch)["long"][1] == 80 for batch in batches) == 1, "it was filled"
    for batch in batches[1:-1]:
        begin, until = spans(batch)["long"]
        assert until is not None
        assert until - begin >= 4
        assert sum(u - b for b, u in spans(batch).values() if u is not None) <= 8


def test_what_is_left_of_the_tokens_goes_to_the_row_with_the_least_to_fill() -> None:
    hand = Hand(prefill_tokens_max=8, batches_in_flight_max=3)
    hand.submit("a", length=101)
    hand.submit("b", length=61)
    hand.submit("c", length=12)
    first, second, third = batches_of(hand.join())
    assert [spans(o) for o in (first, second, third)] == [
        {"a": (0, 8)},
        {"b": (0, 8)},
        {"c": (0, 8)},
    ]
    hand.done(third)
    hand.done(second)
    (batch, _) = hand.in_flight()[1:]
    assert spans(batch) == {"c": (8, 11)}
    hand.done(first)
    hand.work(2)
    batch = next(o for o in prefills(hand) if "a" in rows_of(o) and o is not first)
    assert spans(batch)["a"] == (8, 16)


def test_a_row_that_begins_with_what_is_left_of_a_batch_is_its_last() -> None:
    """Also before one that has nothing to fill."""
    hand = Hand(prefill_tokens_max=8)
    for name, length in (("a", 5), ("b", 9), ("c", 1)):
        hand.submit(name, length=length)
    first = batches_of(hand.join())[0]
    assert spans(first) == {"a": (0, 4), "b": (0, 4)}


def test_of_many_rows_that_were_begun_a_batch_has_no_more_than_its_rows() -> None:
    hand = Hand(prefill_tokens_max=20, prefill_rows_max=3, batches_in_flight_max=8)
    hand.join()
    for name in ("x", "j1", "j2", "j3"):
        hand.submit(name, length=3)
    for name in "abcd":
        hand.submit(name, length=23)
    of = {rows_of(batch)[0]: batch for batch in hand.in_flight()}
    assert len(of) == 8, "each has a batch of its own"
    for name in (*"xabcd", "j1", "j2"):
        assert hand.done(of[name]) == [], "x steps first, and waits for those that join it"
    step, prefill, *_ = batches_of(hand.done(of["j3"]))
    assert rows_of(step) == ["x", "j1", "j2", "j3"]
    assert spans(prefill) == dict.fromkeys("abc", (20, 22))


def running(rows: int, cost: LinearCost) -> Hand:
    """So many rows, in batches of 8 whose steps take 20 ms, on a replica that knows what they and
    prefills take."""
    pair = Pair(LinearCost(0.0), LinearCost(20e-3), acceptance=0.0)
    sizes = ((0, 16), (0, 256), (0, 1024), (1000, 64), (1000, 256)) * 4
    tried = [tried_prefill(begin, count, cost(count, count * begin)) for begin, count in sizes]
    hand = Hand(rows_max=8, draft_len=0, steps_per_batch_max=1, prefill_rows_max=64)
    for index in range(rows):
        hand.submit(f"q{index}")
    hand.join(trials=(*pair.trials(), *tried), context_len=9999, kv_blocks=9999)
    hand.settle()
    return hand


@pytest.mark.parametrize(("rows", "tokens"), [(8, 200), (16, 200), (4, 400)])
def test_a_chunk_takes_the_time_of_a_step_of_all_rows_in_flight_or_ready(
    rows: int, tokens: int
) -> None:
    """Twice as long where half a batch steps."""
    hand = running(rows, LinearCost(0.0, 1e-4))
    hand.submit("long", length=3000)
    while len(prefills(hand)) < 2:
        hand.work()
    _, until = spans(prefills(hand)[1])["long"]
    assert until == pytest.approx(tokens, rel=0.1)


def test_a_chunk_is_the_smaller_the_more_of_its_prompt_is_filled() -> None:
    hand = running(8, LinearCost(0.0, 1e-4, 1e-7))
    hand.submit("long", length=3000)
    while len(prefills(hand)) < 8:
        hand.work()
    chunks = [row.end - row.begin for batch in prefills(hand)[1:] for row in batch.prefill]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[-1] < 0.8 * chunks[0]


@pytest.mark.parametrize(("rows_max", "beside"), [(1, "a"), (2, "a"), (3, "ab")])
def test_new_prompts_have_all_places_but_one_beside_a_long_one_and_one_at_least(
    rows_max: int, beside: str
) -> None:
    hand = Hand(prefill_tokens_max=8, prefill_rows_max=rows_max, batches_in_flight_max=1)
    hand.join()
    hand.submit("long", length=401, max_new_tokens=1)
    for name in "abcd":
        hand.submit(name, length=2)
    hand.work()
    assert set(rows_of(hand.in_flight()[0])) == {"long", *beside}


def partial() -> Hand:
    """On a replica that holds a row filled in part, 10 of 25 positions, while another one steps."""
    hand = Hand(prefill_tokens_max=10, batches_in_flight_max=1, rows_max=2)
    hand.join()
    hand.submit("other")
    hand.work()
    hand.submit("a", length=26)
    while "a" not in rows_of(hand.in_flight()[0]):
        hand.work()
    hand.work()
    assert [rows_of(batch) for batch in hand.in_flight()] == [["other"]]
    return hand


def test_with_its_replica_the_filled_part_is_lost_and_it_is_not_held_against_it() -> None:
    hand = partial()
    hand.join("r2")
    hand.lose()
    sequence = hand.scheduler.pool.sequences["a"]
    assert (sequence.record.deaths, sequence.quarantined) == (0, False)
    while "a" not in rows_of(hand.in_flight("r2")[0]):
        hand.work(1, "r2")
    assert spans(hand.in_flight("r2")[0])["a"] == (0, 10)


def test_a_failed_chunk_sends_its_row_back_to_be_filled_at_once_and_alone() -> None:
    hand = partial()
    (chunk,) = batches_of(hand.work())
    assert spans(chunk) == {"a": (10, 20)}
    actions = hand.fail(chunk)
    assert "a" in released(actions)
    while "a" not in rows_of(hand.in_flight()[0]):
        hand.work()
    (batch,) = hand.in_flight()
    assert spans(batch) == {"a": (0, 25)}, "in quarantine nothing goes beside it"
    hand.done(batch)
    hand.work(5)
    assert len(hand.tokens["a"]) > 0


BEGUN = st.lists(st.tuples(st.integers(2, 60), st.integers(1, 59)), min_size=1, max_size=5)


@given(BEGUN, st.integers(1, 40), st.integers(0, 4))
def test_of_each_batch_the_oldest_has_half_and_the_rest_goes_to_the_least_to_fill(
    begun: list[tuple[int, int]], tokens: int, rows: int
) -> None:
    replica = ReplicaRecord("r", ReplicaSpec(1000, 4, 512, 1000), kv_reserve=1.0)
    for number, (length, filled) in enumerate(begun):
        one = Sequence(Request(str(number), (1,) * (length + 1), 9), number)
        one.prefilled = min(filled, length - 1)
        replica.partial[one.id] = one
    partial = list(replica.partial.values())
    half = first_half(replica, tokens)
    assert half == min(-(-tokens // 2), partial[0].prefill_len - partial[0].prefilled)
    left = tokens - half
    chunks = chunks_of_begun(replica, rows, tokens, left)
    has = {chunk.id: until - begin for chunk, begin, until in chunks}
    assert all(
        begin == chunk.prefilled < until <= chunk.prefill_len for chunk, begin, until in chunks
    )
    assert has["0"] >= half
    assert len(chunks) <= rows + 1
    assert sum(has.values()) <= tokens
    rising = sorted(partial, key=lambda sequence: sequence.prefill_len - sequence.prefilled)
    missing = {
        sequence.id: sequence.prefill_len - sequence.prefilled - has.get(sequence.id, 0)
        for sequence in partial
    }
    full = sum(has.values()) == tokens or len(chunks) == rows + 1
    assert full or not any(missing.values()), "what is left is given"
    for before, after in itertools.pairwise(
        sequence.id for sequence in rising if sequence.id != "0"
    ):
        assert not has.get(after) or not missing[before], "the least first"


def test_nothing_begun_has_no_half() -> None:
    replica = ReplicaRecord("r", ReplicaSpec(1000, 4, 512, 1000), kv_reserve=1.0)
    assert (first_half(replica, 10), oldest_partial(replica)) == (0, None)
