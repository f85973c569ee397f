"""What the page of operators shows of one pool, beside its status and its counts: no token."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from cluster.pool.protocol import BatchView, RequestView
from scheduler.messages import Batch, BatchKind, StepResult
from scheduler.state import Sequence

BATCHES_MAX = 48
"""So many are kept, the last ones."""
_REQUESTS_MAX = 100
"""So many are shown, the oldest ones."""


def batch_view(batch: Batch, result: StepResult) -> BatchView:
    prefill = batch.kind is BatchKind.PREFILL
    lengths = [row.end - row.begin for row in batch.prefill] or [row.length for row in batch.rows]
    rows = result.rows
    return BatchView(
        id=batch.id,
        replica_id=batch.replica_id,
        kind=batch.kind,
        rows=len(lengths),
        steps=result.steps,
        shortest=min(lengths, default=0),
        longest=max(lengths, default=0),
        draft_len=batch.draft_len,
        draft_tokens=sum(row.draft_tokens for row in rows),
        accepted_tokens=sum(sum(row.accepted_at) for row in rows),
        committed_tokens=sum(lengths) if prefill else sum(len(row.tokens) for row in rows),
        seconds=result.times.total_s,
    )


def requests_in_flight(sequences: Mapping[str, Sequence], now_s: float) -> tuple[RequestView, ...]:
    live = (sequence for sequence in sequences.values() if sequence.live)
    return tuple(
        RequestView(
            id=sequence.id,
            state=sequence.state.value,
            replica_id=sequence.replica_id or "",
            prompt_tokens=len(sequence.request.prompt),
            new_tokens=len(sequence.committed),
            new_tokens_max=sequence.request.max_new_tokens,
            draft_tokens=sequence.draft_tokens,
            accepted_tokens=sum(sequence.accepted_at),
            age_s=now_s - sequence.arrived_s,
        )
        for sequence in islice(live, _REQUESTS_MAX)
    )
