"""What the next prefill batch of a replica fills.

Prompts are filled in chunks of a budget of tokens, with decode batches between them, so that rows
which step wait for one chunk at most and never for a whole long prompt. Of each budget

1. the oldest row that was begun has the first half, so that it ends in bounded time;
2. rows that wait come next, in the order of the queue: a short prompt passes long ones. One that
   does not fit begins with what is left and is the last;
3. what is left goes to the rows that were begun, the one with the least to fill first.

Rows in quarantine are filled at once and by themselves.

Knows lengths, ages and counts; nothing of blocks or of the queue.
"""

from __future__ import annotations

from scheduler.state import Chunk, ReplicaRecord, Sequence


def oldest_partial(replica: ReplicaRecord) -> Sequence | None:
    """The row that arrived first of those that were begun."""
    return min(replica.partial.values(), key=lambda row: row.number, default=None)


def first_half(replica: ReplicaRecord, tokens: int) -> int:
    """What the row that was begun first has of the tokens before all others."""
    oldest = oldest_partial(replica)
    return 0 if oldest is None else min(tokens - tokens // 2, oldest.prefill_len - oldest.prefilled)


def chunks_of_begun(replica: ReplicaRecord, rows: int, tokens: int, left: int) -> list[Chunk]:
    """What rows that were begun have of a batch of so many tokens: the oldest its half, and all of
    them what the rows that waited have `left` of the rest, in `rows` places beside the oldest."""
    oldest, given, begun = oldest_partial(replica), [], replica.partial.values()
    for sequence in sorted(begun, key=lambda row: row.prefill_len - row.prefilled):
        has = first_half(replica, tokens) if sequence is oldest else 0
        more = min(sequence.prefill_len - sequence.prefilled - has, left)
        if not has and (rows <= 0 or not more):
            continue
        rows -= not has
        left -= more
        given.append((sequence, sequence.prefilled, sequence.prefilled + has + more))
    return given
