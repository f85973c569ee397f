"""Writes batches: which rows with which lengths. Which rows those are is decided elsewhere."""

from __future__ import annotations

from scheduler.draft_length import StepPlan
from scheduler.messages import Batch, BatchKind, PrefillRow, StepRow
from scheduler.state import Chunk, Sequence


def prefill_batch(batch_id: int, replica_id: str, chunks: list[Chunk]) -> Batch:
    """Fills each of these sequences.

    One that begins at 0 is new to the replica and comes with all its content.
    """
    rows = tuple(
        PrefillRow(
            sequence_id=sequence.id,
            tokens=() if begin else sequence.content(),
            tokens_left=sequence.tokens_left,
            sampling=sequence.request.sampling,
            stop_token_ids=sequence.request.stop_token_ids,
            blocks=sequence.blocks,
            begin=begin,
            until=until,
            salt="" if begin else sequence.salt,
            decoding=None if begin else sequence.request.decoding,
        )
        for sequence, begin, until in chunks
    )
    return Batch(batch_id, replica_id, BatchKind.PREFILL, prefill=rows)


def speculate_batch(
    batch_id: int, replica_id: str, sequences: list[Sequence], plan: StepPlan
) -> Batch:
    """Steps of these residents, which stand by rising length, as planned."""
    rows = tuple(
        [
            StepRow(one.id, one.length, draft_len, one.blocks)
            for one, draft_len in zip(sequences, plan.draft_lens, strict=True)
        ]
    )
    return Batch(
        batch_id,
        replica_id,
        BatchKind.SPECULATE,
        rows=rows,
        draft_len=plan.draft_len,
        steps=plan.steps,
    )
