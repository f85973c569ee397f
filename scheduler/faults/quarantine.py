"""Which row broke a batch: suspects run by themselves until one is left that is to blame.

Pure rules over sequences; who calls them moves the sequences.

A failed batch (the model raised, memory ran out) is halved: its rows may run in batches of half as
many, so a batch that was only too large succeeds, and a row that breaks every batch is alone in
the end. Only failing alone counts against a row, and it then shuns that replica while another could
hold it, so that a broken replica is not mistaken for a broken row.

A replica that dies takes the truth with it: any row of any batch in flight may have killed it, also
the one queued second, for a result may die with the process that made it. All are suspects; with n
of them they run in batches of sqrt(n) rows, after a second death alone. So a row that kills every
replica it touches is known after three deaths, and the others have lost little: each is cleared by
the first token beyond what was in flight when the replica died. A row that goes on for a while
between its kills stays a suspect the longer, the more replicas died with it, and so is found alone.

All that is known goes along when a request goes on in another pool, so deaths count across pools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isqrt

from scheduler.messages import Batch, Blame
from scheduler.state.sequence import Sequence

KILLS_MAX_FACTOR = 4
"""A row that kills alone `failures_max` times this often fails, though it commits in between."""
ATTEMPTS_MAX_FACTOR = 4
"""A row fails after `failures_max` times so many failed attempts alone, whoever is to blame."""
PROBATION_TOKENS = 4
"""For so many tokens more it stays a suspect, for each death after the first."""


def failed(rows: Iterable[Sequence], batch_size: int, replica_id: str, counts: bool) -> None:
    """A batch of `batch_size` rows failed on a live replica; `rows` are the live ones.

    `counts`: the replica has run such batches since one failed last; else it may be the replica
    that is broken, and the row gets more attempts, also on the one that replaces it.
    """
    for sequence in rows:
        limit = max(batch_size // 2, 1)
        sequence.rows_limit = min(sequence.rows_limit or limit, limit)
        if batch_size == 1:
            sequence.failures += counts
            sequence.attempts += 1
            if replica_id not in sequence.shuns:
                sequence.shuns.append(replica_id)


def killed(rows: list[Sequence], in_flight: int, batches: Mapping[int, Batch]) -> None:
    """A replica died with these live rows, of `in_flight`, in these batches."""
    ahead = {
        row.sequence_id: batch.steps * (row.draft_len + 1)
        for batch in batches.values()
        for row in batch.rows
        if batch.steps > 1
    }
    for sequence in rows:
        sequence.failures += 1
        sequence.deaths += 1
        sequence.kills += in_flight == 1
        limit = max(isqrt(len(rows)), 1) if sequence.failures == 1 else 1
        sequence.rows_limit = min(sequence.rows_limit or limit, limit)
        # The tokens of a batch of several steps died, too: it may have been any of them.
        sequence.broke_at = max(sequence.broke_at, sequence.length + ahead.get(sequence.id, 0))
        probation = PROBATION_TOKENS * (sequence.deaths - 1)
        sequence.suspect_until = max(sequence.suspect_until, sequence.broke_at + probation)


def is_guilty(sequence: Sequence, in_flight: int, failures_max: int) -> bool:
    """Whether a row fails for good, after `in_flight` rows were in flight with it."""
    if sequence.kills >= KILLS_MAX_FACTOR * failures_max:
        return True
    if sequence.attempts >= ATTEMPTS_MAX_FACTOR * failures_max:
        return True
    return in_flight == 1 and sequence.failures >= failures_max


def record(sequence: Sequence) -> Blame:
    """What another pool must know of it, as of now."""
    # There a new token is one beyond the present content.
    broke_at = max(sequence.broke_at, sequence.length)
    return Blame(
        sequence.failures,
        sequence.attempts,
        sequence.deaths,
        sequence.kills,
        sequence.rows_limit,
        broke_at,
        max(sequence.suspect_until, broke_at),
    )


def resume(sequence: Sequence, blame: Blame) -> None:
    """Another pool's record of a new sequence counts on; tokens that came since have cleared it."""
    sequence.deaths, sequence.kills = blame.deaths, blame.kills
    sequence.broke_at, sequence.suspect_until = blame.broke_at, blame.suspect_until
    if sequence.length <= blame.broke_at:
        sequence.failures, sequence.attempts = blame.failures, blame.attempts
    if sequence.length <= blame.suspect_until:
        sequence.rows_limit = blame.rows_limit
