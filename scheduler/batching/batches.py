"""Writes batches: which rows with which lengths. Which rows those are is decided elsewhere."""

from __future__ import annotations

from scheduler.draft_length.policy import row_draft_lens
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
    batch_id: int,
    replica_id: str,
    sequences: list[Sequence],
    draft_len: int,
    steps: int,
    verify_tokens: int | None = None,
    least: int = 0,
) -> Batch:
    """Up to `steps` steps of these residents, which stand by rising length.

    `draft_len` is the policy's k; rows that may not draft so much have their own, and the batch's
    is the largest of them; `least`: so much every row may draft. `verify_tokens` is dropped where
    it is all that they draft.
    """
    if draft_len <= least:
        drafted = draft_len * len(sequences)
        rows = tuple([StepRow(one.id, one.length, draft_len, one.blocks) for one in sequences])
    else:
        limits = row_draft_lens(sequences, draft_len)
        drafted, draft_len = sum(limits), max(limits)
        rows = tuple(
            [
                StepRow(one.id, one.length, limit, one.blocks)
                for one, limit in zip(sequences, limits, strict=True)
            ]
        )
    if verify_tokens is not None and verify_tokens >= drafted:
        verify_tokens = None
    return Batch(
        batch_id,
        replica_id,
        BatchKind.SPECULATE,
        rows=rows,
        draft_len=draft_len,
        steps=steps,
        verify_tokens=verify_tokens,
    )
