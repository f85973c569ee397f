"""Proves how many rows a replica's batches have after one was too large for it."""

from __future__ import annotations

from scheduler.messages import Batch, BatchKind, ReplicaSpec, StepRow
from scheduler.state import ReplicaRecord

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
