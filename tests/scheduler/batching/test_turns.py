"""Proves when two batches take turns: only on a replica that drafts one while it checks another,
only where that is faster, and never with one row. In virtual time a step takes the longer of the
two then, and one after the other where there is no second batch."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.adaptive import trials
from benchmarks.shared.linear import LinearCost, LinearTimes
from scheduler.config import SchedulerConfig
from scheduler.messages import BatchKind, Finish, FinishReason, ReplicaSpec, Request
from scheduler.simulation import World, reference_output
from tests.scheduler.hand import Hand, rows_of

K = 4
CHECK_S = 0.010
VOCAB = 1000
DRAFT_AS_LONG = LinearTimes(
    draft=LinearCost(CHECK_S / K), verify=LinearCost(CHECK_S), prefill=LinearCost(0.001)
)
"""Drafting takes as long as checking, whatever the rows."""
DRAFT_QUICK = LinearTimes(
    draft=LinearCost(0.1 * CHECK_S / K), verify=LinearCost(CHECK_S), prefill=LinearCost(0.001)
)


def stepping(
    rows: int, rows_max: int, overlaps: bool, times: LinearTimes, **changes: int
) -> list[list[str]]:
    """The rows of each batch of steps that is in flight once all rows are filled."""
    hand = Hand(rows_max=rows_max, draft_len=K, draft_len_max=K, prefill_rows_max=64, **changes)
    hand.join(overlaps=overlaps, trials=tuple(trials(times)), kv_blocks=10_000)
    for number in range(rows):
        hand.submit(f"q{number}", max_new_tokens=200)
    hand.settle()
    hand.work(6)
    return [rows_of(batch) for batch in hand.in_flight() if batch.kind is BatchKind.SPECULATE]


@pytest.mark.parametrize(
    ("rows", "rows_max", "overlaps", "times", "sizes"),
    [
        (16, 8, True, DRAFT_AS_LONG, [8, 8]),
        (16, 8, True, DRAFT_QUICK, [8, 8]),
        (16, 32, True, DRAFT_QUICK, [16]),
        (16, 32, False, DRAFT_AS_LONG, [16]),
        (1, 8, True, DRAFT_AS_LONG, [1]),
    ],
)
def test_rows_are_parted_where_it_pays(
    rows: int, rows_max: int, overlaps: bool, times: LinearTimes, sizes: list[int]
) -> None:
    """Of a batch that takes as long with half of its rows no half is drafted beside the other:
    there are two batches where one does not hold all rows."""
    batches = stepping(rows, rows_max, overlaps, times)
    assert [len(batch) for batch in batches] == sizes
    held = [row for batch in batches for row in batch]
    assert len(set(held)) == len(held)


@pytest.mark.parametrize("fixed_s", [0.0, 33 * CHECK_S])
def test_one_batch_is_parted_where_halves_take_less_time(fixed_s: float) -> None:
    """Compared with one of all the rows there are, and not of all that a batch may have."""
    by_rows = LinearTimes(
        draft=LinearCost(fixed_s / K, CHECK_S / K),
        verify=LinearCost(fixed_s, CHECK_S / (K + 1)),
        prefill=LinearCost(0.001),
    )
    assert [len(batch) for batch in stepping(16, 32, True, by_rows)] == [8, 8]
    waiting_once = stepping(16, 32, True, by_rows, wait_rounds=1)
    assert [len(batch) for batch in waiting_once] == [8, 8], "no row is due in its first round"
    assert [len(batch) for batch in stepping(16, 32, False, by_rows)] == [16]
    one_in_flight = stepping(16, 32, True, by_rows, batches_in_flight_max=1)
    assert [len(batch) for batch in one_in_flight] == [16]


def chosen(hand: Hand) -> int:
    """The draft length that was chosen last."""
    return hand.scheduler.snapshot().replicas[0].estimates.draft_len


def choosing(rows: int, overlaps: bool = True, **changes: int) -> Hand:
    """So many rows, the first of them in steps; the draft length is chosen by time."""
    hand = Hand(draft_len=None, steps_per_batch_max=1, **{"rows_max": 8, **changes})
    for number in range(rows):
        hand.submit(f"q{number}")
    hand.join(overlaps=overlaps, trials=tuple(trials(DRAFT_AS_LONG)), kv_blocks=10_000)
    hand.settle()
    return hand


def test_a_draft_is_as_long_as_a_check_only_where_it_is_made_beside_one() -> None:
    """Not with one row, nor one batch in flight, nor of rows in quarantine, which run alone."""
    after_check = chosen(choosing(16, overlaps=False))
    assert 0 < after_check < K
    assert chosen(choosing(16)) == K
    assert chosen(choosing(1)) == chosen(choosing(1, overlaps=False)) < K
    assert chosen(choosing(16, batches_in_flight_max=1)) == after_check
    hand = choosing(4, rows_max=2)
    assert chosen(hand) == K
    for batch in hand.in_flight():
        hand.fail(batch)
    assert [len(batch.rows) for batch in hand.in_flight()] == [1]
    assert chosen(hand) == chosen(choosing(1))


def test_rows_are_not_parted_before_the_costs_are_known() -> None:
    hand = Hand(rows_max=32, draft_len=K, draft_len_max=K, prefill_rows_max=64)
    hand.join(overlaps=True, kv_blocks=10_000)
    for number in range(16):
        hand.submit(f"q{number}", max_new_tokens=200)
    hand.settle()
    hand.work(1)
    (batch,) = hand.in_flight()
    assert len(rows_of(batch)) == 16


def test_a_batch_has_room_for_the_draft_that_follows_it() -> None:
    """So a draft ahead takes no blocks, which would be taken out of order."""
    room = {}
    for overlaps in (False, True):
        hand = Hand(rows_max=1, kv_reserve=0.0, draft_len=K, steps_per_batch_max=1)
        hand.join(overlaps=overlaps, block_size=1)
        hand.submit("q", length=10, max_new_tokens=100)
        (batch,) = hand.settle()
        room[overlaps] = batch.rows[0].blocks
    assert room == {False: 10 + K + 1, True: 10 + 2 * (K + 1)}


def run(requests: int, rows_max: int, overlaps: bool) -> tuple[World, float]:
    """A world of requests that all come at once, and when the last one has ended."""
    config = SchedulerConfig(rows_max=rows_max, draft_len=K, steps_per_batch_max=1)
    world = World(Random(0), DRAFT_AS_LONG, config)
    spec = ReplicaSpec(10_000, 16, 4096, VOCAB, overlaps=overlaps)
    world.join(0.0, "r", spec)
    for number in range(requests):
        world.submit(0.0, Request(f"q{number}", (1, number), 200), 0.0)
    return world, world.run(60.0).ended_s


def test_drafting_takes_no_time_beside_a_check_as_long_and_falls_back_with_one_batch() -> None:
    """Nothing is accepted, so all take 200 steps, of 20 ms one after the other."""
    plain, overlapped = run(8, 4, False)[1], run(8, 4, True)[1]
    assert plain == pytest.approx(200 * 2 * 2 * CHECK_S, rel=0.1)
    assert overlapped < 0.65 * plain
    alone = [run(1, 4, overlaps)[1] for overlaps in (False, True)]
    assert alone[1] == pytest.approx(alone[0], rel=0.02)


def test_a_replica_that_dies_between_a_draft_and_its_check_loses_nothing() -> None:
    config = SchedulerConfig(rows_max=4, draft_len=K, steps_per_batch_max=1)
    world = World(Random(0), DRAFT_AS_LONG, config)
    world.join(0.0, "r", ReplicaSpec(10_000, 16, 4096, VOCAB, overlaps=True))
    requests = [Request(f"q{number}", (1, number), 60) for number in range(8)]
    for request in requests:
        world.submit(0.0, request, 0.5)
    # At any time one of two batches is drafted while the other is checked.
    for at_s in (0.1234, 1.3217):
        world.kill(at_s, "r")
    report = world.run(60.0)
    for request in requests:
        end = report.outcomes[request.id].end
        assert isinstance(end, Finish)
        assert end.reason is FinishReason.LENGTH
        tokens, _ = reference_output(request, VOCAB)
        assert tuple(report.outcomes[request.id].tokens) == tokens
    assert sum(report.outcomes[request.id].end.usage.recovered for request in requests) > 0  # type: ignore[union-attr]
    assert world.residents == 0
