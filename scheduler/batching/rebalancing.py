"""When residents move to a replica with fewer of them, and which.

Pure choices; the scheduler sends the rows back and lets the lighter replica take them first.

Moving a resident costs a prefill of its content. It gains where batches take turns: with R
residents a row steps once in ceil(R / rows_max) batches, so it pays to go where that number is
smaller, if enough tokens are left to be committed there.
"""

from __future__ import annotations

from scheduler.batching.grouping import batches_per_round
from scheduler.config import SchedulerConfig
from scheduler.messages import BatchKind
from scheduler.state import Pool, Replica, Sequence

PREFILL_TOKENS_PER_STEP = 32
"""About so many tokens are prefilled in the time in which a row commits one."""


def lightest(replica: Replica, pool: Pool, config: SchedulerConfig) -> Replica | None:
    """The replica that should take rows of this one, if the imbalance is large enough.

    None while sequences wait, for those go first, or while it could not take rows at once.
    """
    if pool.waiting or not pool.free:
        return None
    load, replica_id = pool.free[0]
    target = pool.replicas[replica_id]
    rows_max = config.rows_max
    if replica.load - load <= rows_max:
        return None
    if batches_per_round(load + 1, rows_max) >= batches_per_round(replica.load, rows_max):
        return None
    if target.reserved_for is not None or target.quarantined or target.partial:
        return None
    if target.pipeline.quarantined:
        return None
    if target.ready and target.pipeline.last_kind is BatchKind.PREFILL:
        return None
    return target


def rows_to_move(
    replica: Replica, target: Replica, config: SchedulerConfig, chunk: int
) -> list[Sequence]:
    """Ready rows worth moving, those with the most to gain first: one, and of others what the
    target fills with it in one chunk of so many tokens. What it left would go back."""
    turns = batches_per_round(replica.load, config.rows_max)
    turns_there = batches_per_round(target.load + config.prefill_rows_max, config.rows_max)
    gains = [(_gain(one, turns, turns_there), one) for one in replica.ready]
    most = min(config.prefill_rows_max, (replica.load - target.load) // 2)
    gains.sort(key=lambda pair: (-pair[0], pair[1].number))
    rows: list[Sequence] = []
    tokens = blocks = 0
    for gain, sequence in gains:
        if gain <= 0 or len(rows) == most:
            break
        tokens += sequence.length
        if rows and tokens > chunk:
            break
        if target.could_hold(sequence) and target.has_blocks(sequence, blocks):
            blocks += target.blocks_for(sequence)
            rows.append(sequence)
    return rows


def _gain(sequence: Sequence, turns: int, turns_there: int) -> float:
    """Tokens that it would commit earlier, less those that its prefill costs."""
    saved = sequence.tokens_left * (1 - turns_there / turns)
    return saved - sequence.length / PREFILL_TOKENS_PER_STEP
