"""The invariants of the pool's books, asserted. Tests call this after each event.

O(everything), so production never does. It changes nothing.
"""

from __future__ import annotations

from scheduler.messages import BatchKind
from scheduler.state.pool import Pool
from scheduler.state.replica_record import ReplicaRecord
from scheduler.state.sequence import IN_FLIGHT, RESIDENT, Sequence, State, finished_before_start
from scheduler.validation import blocks_needed

_KIND_OF = {State.PREFILLING: BatchKind.PREFILL, State.STEPPING: BatchKind.SPECULATE}


def check_pool(pool: Pool) -> None:
    """Raises AssertionError at the first broken invariant."""
    for sequence_id, sequence in pool.sequences.items():
        assert sequence.id == sequence_id
        _check_sequence(pool, sequence)
    sequences = pool.sequences.values()
    waiting = {sequence.id for sequence in sequences if sequence.state is State.WAITING}
    assert set(pool.waiting) == waiting, "the queue differs from the waiting sequences"
    pool.waiting.check_integrity()
    outstanding = sum(sequence.tokens_left for sequence in sequences if sequence.live)
    assert pool.limit_left == outstanding, "tokens that may still be committed"
    for replica in pool.replicas.values():
        _check_replica(pool, replica)
    open_ = filter(pool.takes_more, pool.replicas.values())
    takes = sorted((replica.load, replica.id) for replica in open_)
    assert pool.open == takes, "replicas that take more"
    due = sorted(
        (sequence.deadline_s, sequence.number, sequence.id)
        for sequence in sequences
        if sequence.deadline_s is not None and sequence.live
    )
    assert pool.deadlines == due, "deadlines"


def _check_sequence(pool: Pool, sequence: Sequence) -> None:
    name = f"{sequence.id} ({sequence.state})"
    assert sequence.state is not State.FINISHED, f"{name}: finished but kept"
    assert (sequence.batch_id is not None) == (sequence.state in IN_FLIGHT), f"{name}: batch"
    assert (sequence.replica_id is not None) == (sequence.state in RESIDENT), f"{name}: replica"
    content = sequence.content()
    assert sequence.length == len(content), f"{name}: length"
    if sequence.replica_id is not None:
        replica = pool.replicas.get(sequence.replica_id)
        assert replica is not None, f"{name}: on an unknown replica"
        assert replica.residents.get(sequence.id) is sequence, f"{name}: not among residents"
        needed = blocks_needed(sequence.length, replica.spec.block_size)
        assert needed <= sequence.blocks <= replica.room_limit(sequence), f"{name}: blocks"
        if sequence.batch_id is not None:
            found = replica.pipeline.batches.get(sequence.batch_id)
            assert found is not None, f"{name}: its batch is unknown"
            assert sequence in found.rows, f"{name}: not in its batch"
            kind = _KIND_OF.get(sequence.state)
            assert kind in (None, found.batch.kind), f"{name}: batch of another kind"
    else:
        assert sequence.blocks == 0, f"{name}: blocks without a replica"
        assert sequence.prefilled == 0, f"{name}: filled without a replica"
    if sequence.state is State.PARTIAL:
        assert 0 < sequence.prefilled < sequence.prefill_len, f"{name}: filled in part"
        assert not sequence.quarantined, f"{name}: one in quarantine is filled at once"
    if sequence.state in (State.READY, State.STEPPING):
        assert 0 <= sequence.prefilled <= sequence.prefill_len, f"{name}: not filled"
    if sequence.reservation is not None:
        assert sequence.state is State.WAITING, f"{name}: reserves a replica without waiting"
        replica = pool.replicas[sequence.reservation]
        assert replica.reserved_for == sequence.id, f"{name}: reservation"
    if sequence.live:
        assert sequence.tokens_left > 0, f"{name}: nothing left to commit"
        stop = set(sequence.request.stop_token_ids)
        new = sequence.committed[len(sequence.request.committed) :]
        assert not stop.intersection(new), f"{name}: went on after a stop token"
        assert finished_before_start(sequence.request) is None, f"{name}: was complete before"


def _check_replica(pool: Pool, replica: ReplicaRecord) -> None:
    name = f"replica {replica.id}"
    residents = list(replica.residents.values())
    for resident in residents:
        where = f"{name}: resident {resident.id}"
        assert pool.sequences.get(resident.id) is resident, f"{where} is not in the pool"
        assert resident.replica_id == replica.id, f"{where} is elsewhere"
    taken = sum(replica.spec.blocks_taken(resident.blocks) for resident in residents)
    assert replica.blocks_used == taken, f"{name}: blocks"
    assert 0 <= replica.blocks_used <= replica.spec.kv_blocks, f"{name}: too many blocks"
    assert len(residents) <= pool.config.residents_max, f"{name}: too many residents"
    partial = {resident.id for resident in residents if resident.state is State.PARTIAL}
    assert set(replica.partial) == partial, f"{name}: rows that are filled in part"
    ready = {resident for resident in residents if resident.state is State.READY}
    quarantined = {resident for resident in ready if resident.quarantined}
    assert set(replica.quarantined.values()) == quarantined, f"{name}: rows in quarantine"
    assert set(replica.ready) == ready - quarantined, f"{name}: ready rows"
    replica.ready.check_integrity()
    flights = replica.pipeline.batches
    assert len(flights) <= pool.config.batches_in_flight_max, f"{name}: too many batches"
    if any(row.quarantined for flight in flights.values() for row in flight.rows if row.live):
        assert len(flights) == 1, f"{name}: a batch beside one of rows in quarantine"
    for batch_id, flight in flights.items():
        config, batch, where = pool.config, flight.batch, f"{name}: batch {batch_id}"
        assert len(batch.rows) <= config.rows_max, f"{where}: rows"
        # A new prompt has a place beside one that was begun, however few there are.
        assert len(batch.prefill) <= max(config.prefill_rows_max, 2), f"{where}: rows to fill"
        assert [row.id for row in flight.rows] == batch.row_ids, where
    held = [row.id for flight in flights.values() for row in flight.rows]
    assert len(held) == len(set(held)), f"{name}: a row is in two batches"
    in_flight = {resident.id for resident in residents if resident.state in IN_FLIGHT}
    assert set(held) == in_flight, f"{name}: rows of its batches"
    if replica.draining:
        assert not ready, f"{name}: drains but keeps ready rows"
        assert not partial, f"{name}: drains but keeps rows filled in part"
        assert replica.reserved_for is None, f"{name}: drains but is reserved"
    if ready or partial:
        assert flights, f"{name}: rows that could go on and no batch"
    if replica.reserved_for is not None:
        waiting = pool.waiting.get(replica.reserved_for)
        assert waiting is not None, f"{name}: reserved for one that does not wait"
        assert waiting.reservation == replica.id, f"{name}: reservation"
