"""Which replica a waiting sequence goes to, and which sequences a replica takes next.

A sequence is placed at the moment a prefill batch takes it, not before, so that whoever has a
place first serves it. The rule, in this order:

1. Room: the replica is not draining, holds fewer than residents_max sequences, has a place for an
   batch, and has free blocks for the sequence and for `kv_reserve` of its tokens to come. Blocks
   stay reserved until the release. Where sequences grow beyond that and blocks run out, the
   youngest of the lowest priority is sent back; it then waits until all that it may need is free.
2. Balance: a replica with over `rows_max` residents more than the lightest one with room leaves
   the sequence to that one. Load goes before length only when the imbalance is that large.
3. Prefix: where replicas share prefixes, one that has the sequence's own may have a resident more
   for every PREFIX_TOKENS_PER_ROW of its tokens. One that is busy leaves the sequence to another
   that is better off in this way and also busy, passes_max times at most.
4. Load: the fewest residents, then the lowest id.

A sequence that is suspected of breaking batches (see `blame`) goes with other suspects only, to a
replica with nothing in flight, and not to one on which it failed while another could hold it. Where
no other could, it lets all pass that did not fail there while the last prefill of that replica
failed: if theirs does not, the replica is not to blame.

The queue (see `waiting`) is served from its front, but a sequence that does not fit lets smaller
ones pass: at most passes_max of them. Then it claims the first replica that could hold it and that
has no claim yet; until the sequence fits, here or elsewhere, that replica takes besides only
those who are before it in the queue.
So one long request holds up one replica, not the cluster, and it waits at most until that replica
is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from scheduler.batching.prefill import Room
from scheduler.config import SchedulerConfig
from scheduler.messages import BatchKind
from scheduler.state.replica import Replica
from scheduler.state.sequence import Sequence

CANDIDATES_MAX = 16
"""Replicas with room, lightest first, that are compared for one sequence."""


PREFIX_TOKENS_PER_ROW = 64
"""A shared prefix of so many tokens outweighs one resident more: about what their prefill costs, in
steps, and what one row more costs over its life."""

SKIPS_FACTOR = 16
"""Bounds the search of a small replica behind requests that only larger ones could hold."""


@dataclass(slots=True)
class Choice:
    """What a replica takes next; nothing has been changed yet."""

    rows: list[Sequence] = field(default_factory=list)
    overtaken: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences that do not fit here, and how many of `rows` were behind them."""
    left: list[Sequence] = field(default_factory=list)
    """Sequences that other replicas have the prefix of."""
    claim: Sequence | None = None
    """A sequence that was overtaken too often and claims this replica now."""


def has_room(replica: Replica, sequence: Sequence, config: SchedulerConfig) -> bool:
    """Rule 1 without the place for a batch."""
    return (
        not replica.draining
        and replica.load < config.residents_max
        and (replica.claimed_by is None or replica.claimed_by == sequence.id)
        and sequence.length_max <= replica.spec.context_len
        and replica.has_blocks(sequence)
    )


def shunned(
    replica: Replica,
    sequence: Sequence,
    open_replicas: Iterable[tuple[int, str]],
    replicas: Mapping[str, Replica],
) -> bool:
    """Whether the sequence failed on this replica and another could hold it."""
    return replica.id in sequence.shuns and any(
        other_id not in sequence.shuns and replicas[other_id].could_hold(sequence)
        for _, other_id in open_replicas
    )


def best_replica(
    sequence: Sequence,
    open_replicas: Iterable[tuple[int, str]],
    free_replicas: Iterable[tuple[int, str]],
    replicas: Mapping[str, Replica],
    config: SchedulerConfig,
) -> Replica | None:
    """The replica for one sequence, if any has room and a place for a batch now.

    `open_replicas` and `free_replicas` are [(load, id), rising], without and with such a place.
    """
    best: Replica | None = None
    best_rank = (0, 0, "")
    load_most: int | None = None
    candidates = 0
    for load, replica_id in free_replicas:
        if load_most is not None and load > load_most:
            break
        replica = replicas[replica_id]
        if not has_room(replica, sequence, config):
            continue
        if load_most is None:
            # The lightest with room may have no place now: then it is the one to wait for.
            load_most = config.rows_max + next(
                lightest
                for lightest, other_id in open_replicas
                if lightest == load or has_room(replicas[other_id], sequence, config)
            )
            if load > load_most:
                break
        lightest = load_most - config.rows_max
        gain = max(_rows_worth(replica, sequence) - (load - lightest), 0)
        rank = (-gain, load, replica_id)
        if best is None or rank < best_rank:
            best, best_rank = replica, rank
        candidates += 1
        if candidates == CANDIDATES_MAX:
            break
    return best


def next_rows(
    replica: Replica,
    waiting: Mapping[str, Sequence],
    open_replicas: Iterable[tuple[int, str]],
    replicas: Mapping[str, Replica],
    config: SchedulerConfig,
    room: Room,
    again: bool = True,
) -> Choice:
    """What this replica takes from the front of the queue for one prefill batch.

    `waiting` is the queue by id, front first; waiting_scan_max sequences at most are looked at, not
    counting SKIPS_FACTOR times as many that an empty replica of this spec could not hold. `room` is
    what the batch has for them: a row that is begun with what is left ends the batch, and so does
    one for which nothing is left. `again`: also suspects that failed on this replica, if no other
    could hold them.
    """
    if again and BatchKind.PREFILL in replica.fails:
        others = next_rows(replica, waiting, open_replicas, replicas, config, room, again=False)
        # A row that was begun shows it as well.
        if others.rows or others.claim is not None or replica.partial:
            return others
    choice = Choice()
    rows_most = min(room.rows, config.residents_max - replica.load)
    if replica.draining or rows_most <= 0:
        return choice
    taken = taken_most = 0
    passed_over: list[tuple[Sequence, int]] = []
    # Asked once: a lighter replica's load does not change while this one chooses.
    lighter = _lighter(replica, open_replicas, replicas, config)
    rivals = _rivals(replica, open_replicas, replicas)
    looked_at = 0
    queue: Iterable[Sequence] = waiting.values()
    claimed = replica.claimed_by
    if claimed is not None:
        queue = _as_far_as(claimed, queue)
    for seen, sequence in enumerate(queue):
        if len(choice.rows) >= rows_most or looked_at == config.waiting_scan_max:
            break
        if not replica.could_hold(sequence):
            if seen >= SKIPS_FACTOR * config.waiting_scan_max:
                break
            continue
        looked_at += 1
        if sequence.rows_limit is not None:
            failed_here = replica.id in sequence.shuns
            if failed_here and (not again or shunned(replica, sequence, open_replicas, replicas)):
                continue
            if not choice.rows and replica.batches:
                # Suspects go alone: this replica finishes what it has and then takes this one.
                if sequence.claim is None and claimed is None:
                    choice.claim = sequence
                    break
                continue
            if choice.rows and choice.rows[0].rows_limit is None:
                continue
            rows_most = min(rows_most, sequence.rows_limit)
            if len(choice.rows) >= rows_most:
                break
        elif choice.rows and choice.rows[0].rows_limit is not None:
            continue
        if not replica.has_blocks(sequence, taken, taken_most):
            passed_over.append((sequence, len(choice.rows)))
            if sequence.claim is None and claimed is None:
                if sequence.overtaken >= config.passes_max:
                    choice.claim = sequence
                    break
                rows_most = min(
                    rows_most, len(choice.rows) + config.passes_max - sequence.overtaken
                )
            continue
        tokens = room.takes(sequence)
        if sequence.rows_limit is not None and tokens < sequence.fill:
            # A suspect is filled at once, however long it is.
            if choice.rows:
                break
            tokens = sequence.fill
        elif tokens < 0:
            break
        load = replica.load + len(choice.rows)
        if any(
            other.load + config.rows_max < load
            and other.id not in sequence.shuns
            and has_room(other, sequence, config)
            for other in lighter
        ):
            break
        if rivals and _is_better_off(sequence, replica, load, rivals, config):
            choice.left.append(sequence)
            continue
        choice.rows.append(sequence)
        taken += replica.blocks_for(sequence)
        taken_most += replica.blocks_limit(sequence)
        if tokens < sequence.fill or len(choice.rows) >= rows_most:
            break
        room = room.less(tokens)
    choice.overtaken = [
        (sequence, len(choice.rows) - before)
        for sequence, before in passed_over
        if len(choice.rows) > before
    ]
    return choice


def _as_far_as(last: str, queue: Iterable[Sequence]) -> Iterator[Sequence]:
    """Who goes before this sequence in the queue (a higher class, say), and then itself."""
    for sequence in queue:
        yield sequence
        if sequence.id == last:
            return


def _rows_worth(replica: Replica, sequence: Sequence) -> int:
    """How many residents more the replica may have than another, for the prefix that it has."""
    return replica.shared(sequence) // PREFIX_TOKENS_PER_ROW


def _rivals(
    replica: Replica, open_replicas: Iterable[tuple[int, str]], replicas: Mapping[str, Replica]
) -> list[Replica]:
    """Replicas to which this one could leave a sequence whose prefix they have.

    Those have batches in flight and this one has, or has rows for one: all look at the queue again
    soon.
    """
    if not replica.spec.prefix_sharing or not (replica.batches or replica.ready):
        return []
    others = (replicas[replica_id] for _, replica_id in islice(open_replicas, CANDIDATES_MAX))
    return [
        one
        for one in others
        if one is not replica and len(one.prefixes) and one.batches and not one.suspects
    ]


def _is_better_off(
    sequence: Sequence,
    replica: Replica,
    load: int,
    rivals: list[Replica],
    config: SchedulerConfig,
) -> bool:
    """Whether the sequence waits for one of the rivals instead of going to `replica`.

    One that lost its place does not: where it has been is where it should not go.
    """
    if sequence.left >= config.passes_max or sequence.recovered or sequence.claim is not None:
        return False
    worth = [_rows_worth(rival, sequence) for rival in rivals]
    if not any(worth):
        return False
    here = _rows_worth(replica, sequence) - load
    return any(
        there - rival.load > here and has_room(rival, sequence, config)
        for there, rival in zip(worth, rivals, strict=True)
        if there
    )


def _lighter(
    replica: Replica,
    open_replicas: Iterable[tuple[int, str]],
    replicas: Mapping[str, Replica],
    config: SchedulerConfig,
) -> list[Replica]:
    """The lightest replicas that this one could have to leave a sequence to."""
    load_most = replica.load + config.prefill_rows_max - config.rows_max
    lighter = []
    for load, replica_id in islice(open_replicas, CANDIDATES_MAX):
        if load >= load_most:
            break
        if replica_id != replica.id:
            lighter.append(replicas[replica_id])
    return lighter
