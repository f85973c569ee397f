"""Which replica a waiting sequence goes to, and which sequences a replica takes next.

A sequence is placed at the moment a prefill batch takes it, not before: the first replica with a
place serves it. The rule, in this order:

1. Room: the replica is not draining, holds fewer than residents_max sequences, has a place for a
   batch, and has free blocks for the sequence and for `kv_reserve` of its tokens to come. Blocks
   stay set aside until the release. Where sequences grow beyond that and blocks run out, the
   youngest of the lowest priority is sent back; it then waits until all that it may need is free.
2. Balance: a replica with over `rows_max` residents more than the lightest one with room leaves
   the sequence to that one.
3. Prefix: where replicas share prefixes, one that has the sequence's own may have a resident more
   for every PREFIX_TOKENS_PER_ROW of its tokens. One that comes while none has a place goes to the
   first that has.
4. Load: the fewest residents, then the lowest id.

The queue (see `state.waiting`) is served from its front. A sequence that does not fit reserves the
first replica that could hold it and has no reservation yet; until the sequence is placed, here or
elsewhere, that replica takes besides only those that are before it in the queue. So one long
request holds up one replica, not the cluster, and it waits at most until that replica is empty.

A sequence in quarantine (see `faults`) goes with others in quarantine only, to a replica with
nothing in flight, and not to one that is excluded for it. If it cannot go at once, it reserves the
replica.

A resident moves to a replica with fewer of them where that gains more than the prefill of its
content costs. Batches take turns: with R residents a row steps once in ceil(R / rows_max) of them.
The scheduler sends such rows back and lets the lighter replica take them first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from scheduler.batching.grouping import batches_per_round
from scheduler.batching.prefill import first_half
from scheduler.config import SchedulerConfig
from scheduler.faults import excluded
from scheduler.messages import BatchKind
from scheduler.state import Chunk, Pool, ReplicaRecord, Sequence

CANDIDATES_MAX = 16
"""Replicas, lightest first, that are compared for one sequence."""
PREFIX_TOKENS_PER_ROW = 64
"""A shared prefix of so many tokens outweighs one resident more: about what their prefill costs, in
steps, and what one row more costs over its life."""
PREFILL_TOKENS_PER_STEP = 32
"""About so many tokens are prefilled in the time in which a row commits one."""
SCAN_MAX = 512
"""Waiting sequences looked at, from the front, when a replica has a place. Those that only larger
replicas could hold may stand before others."""


@dataclass(slots=True)
class Placement:
    """What a replica takes next; nothing has been changed yet."""

    chunks: list[Chunk] = field(default_factory=list)
    tokens_left: int | None = None
    """What these leave of the batch for rows that were begun; None if those stay out."""
    reserve: Sequence | None = None
    """A sequence that reserves this replica now."""


def has_room(replica: ReplicaRecord, sequence: Sequence, pool: Pool) -> bool:
    """Rule 1 without the place for a batch."""
    return (
        pool.takes_more(replica)
        and replica.reserved_for in (None, sequence.id)
        and replica.could_hold(sequence)
        and replica.has_blocks(sequence)
    )


def best_replica(sequence: Sequence, pool: Pool) -> ReplicaRecord | None:
    """The replica for one sequence, if any has room and a place for a batch now."""
    config = pool.config
    ranks: list[tuple[int, int, str]] = []
    lightest: int | None = None
    for load, replica_id in pool.open:
        replica = pool.replicas[replica_id]
        if not has_room(replica, sequence, pool):
            continue
        # The lightest with room may have no place now: then it is the one to wait for.
        lightest = load if lightest is None else lightest
        if load > lightest + config.rows_max or len(ranks) == CANDIDATES_MAX:
            break
        if len(replica.pipeline) == config.batches_in_flight_max:
            continue
        rows_worth = replica.shared(sequence) // PREFIX_TOKENS_PER_ROW
        ranks.append((min(load - rows_worth, lightest), load, replica_id))
    return pool.replicas[min(ranks)[-1]] if ranks else None


def next_placement(replica: ReplicaRecord, pool: Pool, tokens: int) -> Placement:
    """What this replica takes for a prefill batch of so many tokens, rows in quarantine first.

    Needs a replica that takes more sequences or has rows that were begun.
    """
    placement = _next_quarantined(replica, pool)
    if placement.chunks or placement.reserve is not None:
        return placement
    return _next_rows(replica, pool, tokens)


def _next_quarantined(replica: ReplicaRecord, pool: Pool) -> Placement:
    """Waiting rows in quarantine that go here by themselves."""
    placement = Placement()
    config, chunks = pool.config, placement.chunks
    rows_most = min(config.prefill_rows_max, config.residents_max - replica.load)
    tokens = 0
    for sequence in pool.waiting.quarantined():
        if not replica.could_hold(sequence) or excluded(replica, sequence, pool):
            continue
        assert sequence.record.rows_limit is not None
        rows_most = min(rows_most, sequence.record.rows_limit)
        tokens += sequence.prefill_len
        beside = [placed for placed, _, _ in chunks]
        fits = len(chunks) < rows_most and replica.has_blocks(sequence, beside)
        if chunks and (not fits or tokens > config.prefill_tokens_max):
            break
        if replica.pipeline.batches or not fits:
            if replica.reserved_for is None and sequence.reservation is None:
                placement.reserve = sequence
            break
        chunks.append((sequence, 0, sequence.prefill_len))
    return placement


def _next_rows(replica: ReplicaRecord, pool: Pool, tokens: int) -> Placement:
    """Other rows that this replica takes from the front of the queue for one prefill batch.

    A row that is begun with what is left of the batch ends it.
    """
    config = pool.config
    left = tokens - first_half(replica, tokens)
    placement = Placement()
    chunks = placement.chunks
    rows_most = min(
        # One place is for a row that was begun, if there is more than one.
        max(config.prefill_rows_max - bool(replica.partial), 1),
        config.residents_max - replica.load,
    )
    # Asked once: the load of other replicas does not change while this one chooses.
    others = [pool.replicas[id] for _, id in pool.open[:CANDIDATES_MAX] if id != replica.id]
    reserved_for = replica.reserved_for
    for sequence in islice(_as_far_as(reserved_for, pool.waiting.values()), SCAN_MAX):
        if len(chunks) >= rows_most:
            break
        if sequence.quarantined or not replica.could_hold(sequence):
            continue
        if not replica.has_blocks(sequence, [placed for placed, _, _ in chunks]):
            if sequence.reservation is None and reserved_for is None:
                placement.reserve = sequence
                break
            continue
        part = min(sequence.prefill_len, left)
        load = replica.load + len(chunks)
        if (sequence.prefill_len and not left) or _is_lighter(others, sequence, load, pool):
            break
        chunks.append((sequence, 0, part))
        left -= part
        if part < sequence.prefill_len:
            break
    placement.tokens_left = left
    return placement


def _as_far_as(last: str | None, queue: Iterable[Sequence]) -> Iterator[Sequence]:
    """Those before this sequence in the queue (of a higher class, say), and then itself."""
    for sequence in queue:
        yield sequence
        if sequence.id == last:
            return


def _is_lighter(others: list[ReplicaRecord], sequence: Sequence, load: int, pool: Pool) -> bool:
    """Whether one of the others is so much lighter that the sequence is left to it (rule 2)."""
    return any(
        other.load + pool.config.rows_max < load and has_room(other, sequence, pool)
        for other in others
    )


def lightest(replica: ReplicaRecord, pool: Pool) -> ReplicaRecord | None:
    """The replica that should take rows of this one, if the imbalance is large enough.

    None while sequences wait, for those go first, or while it could not take rows at once.
    """
    if pool.waiting:
        return None
    most, rows_max = pool.config.batches_in_flight_max, pool.config.rows_max
    takes = (pool.replicas[replica_id] for _, replica_id in pool.open)
    target = next((other for other in takes if len(other.pipeline) < most), None)
    # So many fewer are a batch less in each round.
    if target is None or replica.load - target.load <= rows_max:
        return None
    if target.quarantined or target.pipeline.quarantined:
        return None
    # Rows step first, also where one is filled in part.
    if target.ready and target.pipeline.last_kind is BatchKind.PREFILL:
        return None
    return target


def rows_to_move(
    replica: ReplicaRecord, target: ReplicaRecord, config: SchedulerConfig, chunk: int
) -> list[Sequence]:
    """Ready rows worth moving, those with the most to gain first: one, and of others what the
    target fills with it in one chunk of so many tokens. What it left would go back."""
    turns = batches_per_round(replica.load, config.rows_max)
    turns_there = batches_per_round(target.load + config.prefill_rows_max, config.rows_max)
    # Tokens that a row would commit earlier, less those that its prefill costs.
    share = 1 - turns_there / turns
    gains = [
        (row.tokens_left * share - row.length / PREFILL_TOKENS_PER_STEP, row)
        for row in replica.ready
    ]
    most = min(config.prefill_rows_max, (replica.load - target.load) // 2)
    gains.sort(key=lambda pair: (-pair[0], pair[1].number))
    rows: list[Sequence] = []
    tokens = 0
    for gain, sequence in gains:
        if gain <= 0 or len(rows) == most:
            break
        tokens += sequence.length
        if rows and tokens > chunk:
            break
        if target.could_hold(sequence) and target.has_blocks(sequence, rows):
            rows.append(sequence)
    return rows
