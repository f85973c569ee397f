"""When residents move to a replica with fewer of them, and which.

Pure choices; the scheduler sends the rows back and lets the lighter replica take them first.

Moving a resident costs a prefill of its content. It gains where groups take turns: with R residents
a row steps once in ceil(R / rows_max) batches, so it pays to go where that number is smaller, if
enough tokens are left to be committed there. Rows that may step with few others (see `narrowing`)
need batches of their own, so where there are such it is turns that are compared, not rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler.config import SchedulerConfig
from scheduler.grouping import groups_needed
from scheduler.messages import BatchKind
from scheduler.pool import Pool
from scheduler.residents import Replica
from scheduler.sequence import Sequence

PREFILL_TOKENS_PER_STEP = 32
"""About so many tokens are prefilled in the time in which a row commits one."""

LOOKED_AT = 8
"""Of the replicas with the fewest rows so many are looked at for the one with the fewest turns."""


def lightest(replica: Replica, pool: Pool, config: SchedulerConfig) -> Replica | None:
    """The replica that should take rows of this one, if the imbalance is large enough.

    Nobody must wait (waiting sequences go first), and it must be able to take them at once.
    """
    if pool.waiting or not pool.free:
        return None
    load, replica_id = pool.free[0]
    target = pool.replicas[replica_id]
    if replica.narrow:
        near = (pool.replicas[replica_id] for _, replica_id in pool.free[:LOOKED_AT])
        target = min(near, key=lambda one: (_turns(_shared(one, config)), one.load, one.id))
    if replica.narrow or target.narrow:
        if _turns(_shared(replica, config)) - _turns(_shared(target, config)) <= 1:
            return None
    else:
        rows_max = config.rows_max
        if replica.load - load <= rows_max:
            return None
        if groups_needed(load + 1, rows_max) >= groups_needed(replica.load, rows_max):
            return None
    if target.claimed_by is not None:
        return None
    if target.alone is not None or target.suspects or target.partial:
        return None
    if target.ready and target.last_kind is BatchKind.PREFILL:
        return None
    return target


def rows_to_move(
    replica: Replica, target: Replica, config: SchedulerConfig, chunk: int
) -> list[Sequence]:
    """Ready rows worth moving, those with the most to gain first: one, and of others what the
    target fills with it in one chunk of so many tokens. What it left would go back."""
    if replica.narrow or target.narrow:
        gains = _gains_of_turns(replica, target, config)
        most = config.prefill_rows_max
    else:
        turns = groups_needed(replica.load, config.rows_max)
        turns_there = groups_needed(target.load + config.prefill_rows_max, config.rows_max)
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


def _gains_of_turns(
    replica: Replica, target: Replica, config: SchedulerConfig
) -> list[tuple[float, Sequence]]:
    """What each row gains if those before it, which have most left, have gone; 0 for who stays."""
    here, there = _shared(replica, config), _shared(target, config)
    gains: list[tuple[float, Sequence]] = []
    for one in sorted(replica.ready, key=lambda one: (-one.tokens_left, one.number)):
        turns, together = _turns(here), _together(one, config)
        moved = there + Counter([together])
        gain = _gain(one, turns, _turns(moved))
        if len(gains) < config.prefill_rows_max and gain > 0:
            gains.append((gain, one))
            here[together] -= 1
            there = moved
    return gains


def _together(sequence: Sequence, config: SchedulerConfig) -> int:
    """In groups of how many rows at most it steps. A spread that is limited may count as none."""
    return config.rows_max if sequence.limits is None else sequence.limits.rows_max


def _shared(replica: Replica, config: SchedulerConfig) -> Counter[int]:
    """How many residents step in groups of how many rows at most."""
    narrow: Iterable[Sequence] = replica.narrow.values()
    shared = Counter(_together(one, config) for one in narrow)
    shared[config.rows_max] += replica.load - len(replica.narrow)
    return shared


def _turns(shared: Counter[int]) -> int:
    """In how many batches all these rows step once."""
    return sum(groups_needed(rows, together) for together, rows in shared.items())
