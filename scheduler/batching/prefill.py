"""What the next prefill batch of a replica fills, and whether it goes before a decode batch.

Prompts are filled in chunks of a budget of tokens, with decode batches between them, so that rows
which step wait for one chunk at most and never for a whole long prompt. Of each budget

1. the oldest row that was begun has the first half, so that it ends in bounded time;
2. rows that wait come next, in the order of the queue: a short prompt passes long ones. One that
   does not fit begins with what is left and is the last;
3. what is left goes to the rows that were begun, the one with the least to fill first.

A chunk that does not complete its row has at least CHUNK_SHARE of the budget, for a pass of the
model over a few tokens costs as much as one over many.

Where rows step in several groups, and more waits than one chunk takes, several chunks are one batch
after as many decode batches: a row still waits for a chunk per group of its round, and the fixed
cost of a batch, which on small ones is a quarter of it, is paid once.

Knows lengths, ages and counts; nothing of blocks or of the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.batching.grouping import groups_needed
from scheduler.config import SchedulerConfig
from scheduler.messages import BatchKind
from scheduler.state.replica import Replica
from scheduler.state.sequence import Sequence

ENOUGH_SHARE = 16
"""Prompts need not wait for more to come once they are one for so many rows that run: in simulated
closed loops with prefills as dear as steps, waiting for more gained nothing with 16 rows, 4 % of
throughput with 32 and 7 % with 64, and a share of 4 lost 3 % with 8."""
CHUNK_SHARE = 4
"""A part of a prompt has at least one in so many of the batch's tokens."""
CHUNKS_MAX = 3
"""Chunks of one batch at most. With 64 prompts at once, the demo pair's times and groups of 8 or 16
in virtual time, 2 give 2 % of throughput, 3 give 3.5 % and 8 give 4 %; with more, tokens come in
longer gaps at the worst."""


@dataclass(frozen=True, slots=True)
class Room:
    """What of a prefill batch is left for rows that wait."""

    rows: int
    tokens: int
    least: int
    """Tokens of the smallest part of a prompt that is worth a place."""

    def takes(self, sequence: Sequence) -> int:
        """How many of a row's tokens to fill it takes; -1 if the row has to wait."""
        fill = sequence.fill
        if fill <= self.tokens:
            return fill
        return self.tokens if self.tokens >= self.least else -1

    def less(self, tokens: int) -> Room:
        """After one more row with so many tokens."""
        return Room(self.rows - 1, self.tokens - tokens, self.least)


def oldest_partial(replica: Replica) -> Sequence | None:
    """The row that arrived first of those that were begun."""
    return min(replica.partial.values(), key=lambda one: one.number, default=None)


def room_for_waiting(replica: Replica, budget: int, config: SchedulerConfig) -> Room:
    """What a prefill batch of `budget` tokens has for rows that wait: at least one row."""
    rows, tokens = config.prefill_rows_max, budget
    oldest = oldest_partial(replica)
    if oldest is not None:
        rows = max(rows - 1, 1)
        tokens -= _first_of(oldest, budget)
    return Room(rows, tokens, max(budget // CHUNK_SHARE, 1))


def _first_of(oldest: Sequence, budget: int) -> int:
    """What the row that was begun first has of the budget before all others."""
    return min(budget - budget // 2, oldest.fill - oldest.filled)


def chunks(
    replica: Replica, chosen: list[Sequence], budget: int, config: SchedulerConfig
) -> list[tuple[Sequence, int, int]]:
    """(row, begin, until) of the next prefill batch, with `chosen` rows that waited.

    Suspects are filled at once and by themselves (see `blame`).
    """
    if chosen and chosen[0].rows_limit is not None:
        return [(one, 0, one.fill) for one in chosen]
    room = room_for_waiting(replica, budget, config)
    given = []
    for sequence in chosen:
        tokens = room.takes(sequence)
        assert tokens >= 0, f"{sequence.id}: there is no room for it"
        given.append((sequence, 0, tokens))
        room = room.less(tokens)
    oldest = oldest_partial(replica)
    if oldest is None:
        return given
    left = budget - sum(tokens for _, _, tokens in given)
    first = _first_of(oldest, budget)
    begun = {oldest.id: first}
    left -= first
    places = config.prefill_rows_max - len(given) - 1
    for sequence in sorted(replica.partial.values(), key=lambda one: one.fill - one.filled):
        has = begun.get(sequence.id, 0)
        wanted = sequence.fill - sequence.filled - has
        more = min(wanted, left)
        worth = has or more >= room.least or more == wanted
        if not worth or (not has and places <= 0):
            continue
        places -= not has
        begun[sequence.id] = has + more
        left -= more
    for sequence_id, tokens in begun.items():
        sequence = replica.partial[sequence_id]
        given.append((sequence, sequence.filled, sequence.filled + tokens))
    return given


def chunks_at_once(replica: Replica, rows_max: int) -> int:
    """Of how many chunks the next batch may be, as a chunk goes before each decode batch."""
    groups = groups_needed(len(replica.ready) + replica.stepping, rows_max)
    return max(min(groups, CHUNKS_MAX), 1)


def batches_since(replica: Replica) -> int:
    """Decode batches since the last prefill batch, CHUNKS_MAX at most."""
    if replica.prefilled_at is None:
        return CHUNKS_MAX
    return min(replica.ready.batches - replica.prefilled_at, CHUNKS_MAX)


def goes_first(replica: Replica, chosen: list[Sequence], budget: int, batches: int) -> bool:
    """Whether a prefill batch may go now, with `chosen` rows that waited.

    Never two in a row while rows are ready, so that neither those that wait nor those that are
    ready starve. And a few short prompts wait for others to share their order with, while rows
    step: for `batches` decode batches at most. Not those that lost their place, nor suspects.
    """
    if replica.ready and replica.last_kind is BatchKind.PREFILL:
        return False
    running = len(replica.ready) + replica.stepping
    if replica.partial or ENOUGH_SHARE * len(chosen) >= running:
        return True
    if 2 * sum(one.fill for one in chosen) >= budget:
        return True
    if any(one.recovered or one.rows_limit is not None for one in chosen):
        return True
    if replica.gathers_until is None:
        replica.gathers_until = replica.ready.batches + batches
    return replica.ready.batches >= replica.gathers_until
