"""Which row broke a batch: its rows run in quarantine until the one at fault is found.

Pure rules over the failure records of sequences; the scheduler moves the sequences.

A failed batch (memory ran out, a bug) is halved: its rows may run in batches of half as many, so a
batch that was only too large succeeds, and a row that breaks every batch is alone in the end. Only
failing alone counts against a row (the worker has seen that the replica is sound), and the replica
on which it failed is then excluded for it while another could hold it.

Of a replica that dies any row of any batch in flight may be the cause, also of the batch queued
second, for a result may be lost with the process that made it. All go into quarantine: n of them
run in batches of sqrt(n) rows, after a second death alone. So a row that kills every replica it
touches is known after three deaths, and the others have lost little: each is cleared by the first
token beyond what was in flight when the replica died. A row that goes on for a while between its
kills stays in quarantine the longer, the more replicas died with it, and so is found alone.

The record goes along when a request goes on in another pool, so deaths count across pools.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isqrt

from scheduler.messages import FailureRecord
from scheduler.state import InFlight, Pool, ReplicaRecord, Sequence

KILLS_MAX_FACTOR = 4
"""A row that kills alone `failures_max` times this often fails, though it commits in between."""
PROBATION_TOKENS = 4
"""For so many tokens more it stays in quarantine, for each death after the first."""


def batch_failed(rows: Iterable[Sequence], batch_size: int, replica_id: str) -> None:
    """A batch of `batch_size` rows failed on a sound replica; `rows` are the live ones."""
    for sequence in rows:
        record = sequence.record
        if batch_size == 1:
            record = replace(record, failures=record.failures + 1)
            sequence.excluded_replicas.append(replica_id)
        _quarantine(sequence, record, max(batch_size // 2, 1), broke_at=sequence.length)


def replica_died(rows: list[Sequence], flights: Iterable[InFlight]) -> None:
    """A replica died with these batches in flight; `rows` are the live ones of all of them."""
    # The tokens of a batch of several steps died, too: it may have been any of them.
    ahead = {
        row.sequence_id: flight.batch.steps * (row.draft_len + 1)
        for flight in flights
        for row in flight.batch.rows
        if flight.batch.steps > 1
    }
    in_flight = sum(len(flight.rows) for flight in flights)
    for sequence in rows:
        record = sequence.record
        record = replace(
            record,
            failures=record.failures + 1,
            deaths=record.deaths + 1,
            kills=record.kills + (in_flight == 1),
        )
        limit = isqrt(len(rows)) if record.failures == 1 else 1
        broke_at = sequence.length + ahead.get(sequence.id, 0)
        _quarantine(sequence, record, limit, broke_at, PROBATION_TOKENS * (record.deaths - 1))


def _quarantine(
    sequence: Sequence, record: FailureRecord, limit: int, broke_at: int, probation: int = 0
) -> None:
    """`limit` is never above the last one: no batch of rows in quarantine is larger than that."""
    broke_at = max(record.broke_at, broke_at)
    sequence.record = replace(
        record,
        rows_limit=limit,
        broke_at=broke_at,
        quarantined_until=max(record.quarantined_until, broke_at + probation),
    )


def is_guilty(sequence: Sequence, in_flight: int, failures_max: int) -> bool:
    """Whether a row fails for good, after `in_flight` rows were in flight with it."""
    record = sequence.record
    if record.kills >= KILLS_MAX_FACTOR * failures_max:
        return True
    return in_flight == 1 and record.failures >= failures_max


def excluded(replica: ReplicaRecord, sequence: Sequence, pool: Pool) -> bool:
    """Whether the sequence failed alone on this replica and another could hold it."""
    return replica.id in sequence.excluded_replicas and any(
        other_id not in sequence.excluded_replicas and pool.replicas[other_id].could_hold(sequence)
        for _, other_id in pool.open
    )
