"""What the next prefill batch of a replica fills.

Prompts are filled in chunks of a budget of tokens, with decode batches between them, so that rows
which step wait for one chunk at most and never for a whole long prompt. Of each budget

1. the oldest row that was begun has the first half, so that it ends in bounded time;
2. rows that wait come next, in the order of the queue: a short prompt passes long ones. One that
   does not fit begins with what is left and is the last;
3. what is left goes to the rows that were begun, the one with the least to fill first.

A chunk that does not complete its row has at least CHUNK_SHARE of the budget, for a pass of the
model over a few tokens costs as much as one over many. Rows in quarantine are filled at once and by
themselves.

Knows lengths, ages and counts; nothing of blocks or of the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.config import SchedulerConfig
from scheduler.state import Chunk, Replica, Sequence

CHUNK_SHARE = 4
"""A part of a prompt has at least one in so many of the batch's tokens."""


@dataclass(frozen=True, slots=True)
class PrefillBudget:
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

    def less(self, tokens: int) -> PrefillBudget:
        """After one more row with so many tokens."""
        return PrefillBudget(self.rows - 1, self.tokens - tokens, self.least)


def oldest_partial(replica: Replica) -> Sequence | None:
    """The row that arrived first of those that were begun."""
    return min(replica.partial.values(), key=lambda one: one.number, default=None)


def budget_for_waiting(replica: Replica, tokens: int, config: SchedulerConfig) -> PrefillBudget:
    """What a prefill batch of so many tokens has for rows that wait: at least one row."""
    rows, least = config.prefill_rows_max, max(tokens // CHUNK_SHARE, 1)
    oldest = oldest_partial(replica)
    if oldest is not None:
        rows = max(rows - 1, 1)
        tokens -= _first_of(oldest, tokens)
    return PrefillBudget(rows, tokens, least)


def _first_of(oldest: Sequence, tokens: int) -> int:
    """What the row that was begun first has of the tokens before all others."""
    return min(tokens - tokens // 2, oldest.fill - oldest.filled)


def chunks(
    replica: Replica, chosen: list[Sequence], tokens: int, config: SchedulerConfig
) -> list[Chunk]:
    """The next prefill batch of so many tokens, with `chosen` rows that waited."""
    if chosen and chosen[0].quarantined:
        return [(one, 0, one.fill) for one in chosen]
    budget = budget_for_waiting(replica, tokens, config)
    given = []
    for sequence in chosen:
        taken = budget.takes(sequence)
        assert taken >= 0, f"{sequence.id}: there is no room for it"
        given.append((sequence, 0, taken))
        budget = budget.less(taken)
    oldest = oldest_partial(replica)
    if oldest is None:
        return given
    first = _first_of(oldest, tokens)
    left = tokens - first - sum(taken for _, _, taken in given)
    places = config.prefill_rows_max - len(given) - 1
    for sequence in sorted(replica.partial.values(), key=lambda one: one.fill - one.filled):
        has = first if sequence is oldest else 0
        wanted = sequence.fill - sequence.filled - has
        more = min(wanted, left)
        if not has and (places <= 0 or budget.least > more < wanted):
            continue
        places -= not has
        left -= more
        given.append((sequence, sequence.filled, sequence.filled + has + more))
    return given
