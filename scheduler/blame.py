"""Which row broke an order: suspects run by themselves until one is left that is to blame.

Pure rules over sequences; who calls them moves the sequences.

A failed order (the model raised, memory ran out) is halved: its rows may run in orders of half as
many, so an order that was only too large succeeds, and a row that breaks every order is alone in
the end. Only failing alone counts against a row, and it then shuns that replica while another could
hold it, so that a broken replica is not mistaken for a broken row.

A replica that dies takes the truth with it: any row of any order in flight may have killed it, also
the one queued second, for a result may die with the process that made it. All are suspects; with n
of them they run in orders of sqrt(n) rows, after a second death alone. So a row that kills every
replica it touches is known after three deaths, and the others have lost little: each is cleared by
the first token it commits.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt

from scheduler.sequence import Sequence

KILLS_MAX_FACTOR = 4
"""A row that commits between its kills is never alone to blame for long; after `failures_max` times
this many kills in all it fails nevertheless."""


def failed(rows: Iterable[Sequence], order_size: int, replica_id: str) -> None:
    """An order of `order_size` rows failed on a replica that lives; `rows` are the live ones."""
    for sequence in rows:
        limit = max(order_size // 2, 1)
        sequence.rows_limit = min(sequence.rows_limit or limit, limit)
        if order_size == 1:
            sequence.failures += 1
            if replica_id not in sequence.shuns:
                sequence.shuns.append(replica_id)


def killed(rows: list[Sequence]) -> None:
    """A replica died with these live rows in flight."""
    for sequence in rows:
        sequence.failures += 1
        sequence.kills += 1
        limit = max(isqrt(len(rows)), 1) if sequence.failures == 1 else 1
        sequence.rows_limit = min(sequence.rows_limit or limit, limit)


def is_guilty(sequence: Sequence, in_flight: int, failures_max: int) -> bool:
    """Whether a row fails for good, after `in_flight` rows were in flight with it."""
    if sequence.kills >= KILLS_MAX_FACTOR * failures_max:
        return True
    return in_flight == 1 and sequence.failures >= failures_max
