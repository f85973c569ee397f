"""Proves what a replica's record says of its batches: how large they may be after one was too
large, which rows a prefill completes, and which batch can end early."""

from __future__ import annotations

from scheduler.messages import Batch, BatchKind, Interrupt, ReplicaSpec, StepRow
from scheduler.state import ReplicaRecord
from tests.scheduler.hand import Hand, of_kind

SPEC = ReplicaSpec(kv_blocks=100, block_size=4, context_len=100, vocab_size=50)


def test_only_batches_as_large_as_may_be_lead_to_larger_ones_again() -> None:
    replica = ReplicaRecord("r", SPEC, kv_reserve=1.0)
    replica.lower_rows_cap(4)
    for rows, larger in ((3, False), (4, True)):
        step_rows = tuple(StepRow(str(number), 8, 0, 2) for number in range(rows))
        for number in range(50):
            batch = Batch(number, "r", BatchKind.SPECULATE, rows=step_rows)
            replica.raise_rows_cap(batch)
        assert (replica.rows_cap > 4) == larger
    assert 4 < replica.rows_max(16) < 16


def test_a_row_joins_those_that_step_with_the_last_chunk_of_its_prompt() -> None:
    hand = Hand(prefill_tokens_max=8)
    hand.join()
    hand.submit("a", length=13)
    found = []
    for _ in range(3):
        found.append((hand.in_flight()[0].kind, hand.replica().joining))
        hand.work()
    prefill = BatchKind.PREFILL
    assert found == [(prefill, 0), (prefill, 1), (BatchKind.SPECULATE, 0)]


def test_a_batch_of_two_steps_ends_early_for_a_new_request() -> None:
    hand = Hand(steps_per_batch_max=2)
    hand.join()
    hand.submit("a")
    hand.done(hand.settle()[0])
    (batch,) = hand.in_flight()
    assert batch.steps == 2
    assert of_kind(hand.submit("b"), Interrupt) == [Interrupt("r", batch.id)]
