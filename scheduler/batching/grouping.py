"""Which ready rows step next: rows of near length, with a bounded wait.

A same-length batch is one of spread 0; it costs least where a kernel reads all rows as far as the
longest. Those of `replicas` read each to its own end, and a CPU computes rows of one length
together: eight rows of 100 to 1,400 positions take it 1.15 times as long as of 600 each.

A row is passed over whenever a batch of steps is dispatched on its replica while the row is ready
and not in it. Let G = ceil(R / rows_max) be the least number of batches that hold the R rows that
step on a replica (ready or in a batch), and w the config's `wait_rounds`. Two rules:

1. Due rows first. A row is due once it was passed over (w - 1) * G times. Due rows come first, the
   oldest before the others, and those next to the oldest fill what is left of the batch.
2. The window. If no row is due, take the tightest window around the row with the greatest lag, if
   an equal share is LAG steps more than it had: one that always waits a little longer ends much
   later. A row without a token is behind all others. If none is so far behind, the shortest rows.

The bound: no row is passed over more than w * G - 1 times in a row, G taken at its largest during
the wait. Rows that became ready after a row s were passed over no more often than s. Once s is due,
all that are older are, too, and every batch takes the rows_max oldest of them; s and those before
it are at most R rows, so s is in one of the next G batches, and is passed over at most G - 1 times
more. So no row waits for more than w rounds, a round being G batches. With w = 1 rows go in the
order in which they became ready, as in EQSPEC without grouping (arXiv 2510.22876).

Where two batches take turns (`rows_of_turn`) a batch has fewer rows, so G is 2 at least there, and
w. Due rows may be more than those: then up to rows_max of them go, so the bound stands.
"""

from __future__ import annotations

from itertools import islice, takewhile
from operator import attrgetter

from scheduler.state import ReadyRows, Sequence

LAG = 2.0
"""Steps."""


def passes_bound(rows: int, rows_max: int, wait_rounds: int, overlaps: bool = False) -> int:
    """How often at most a ready row is passed over in a row, with `rows` rows on its replica."""
    per_round = batches_per_round(rows, rows_max)
    if overlaps:
        per_round, wait_rounds = max(per_round, min(rows, 2)), max(wait_rounds, 2)
    return max(wait_rounds * per_round - 1, 0)


def batches_per_round(rows: int, rows_max: int) -> int:
    """G: the least number of batches that hold all rows once."""
    return -(-rows // rows_max)


def rows_of_turn(rows: int, rows_max: int) -> int:
    """Rows of each of two batches that take turns on a replica with so many rows, which drafts one
    while it checks the other."""
    return min(-(-rows // 2), rows_max)


def choose_rows(
    ready: ReadyRows, rows_max: int, per_round: int, wait_rounds: int, turn: int | None = None
) -> list[Sequence]:
    """The rows of the next batch, shortest first. `per_round` is G. `turn`: so many are enough, but
    for those that are due. Needs a ready row."""
    size, due_from = min(turn or rows_max, len(ready)), (wait_rounds - 1) * per_round
    rising, oldest = ready.by_length(), next(iter(ready))
    if ready.times_passed_over(oldest) < due_from:
        lag, row = ready.most_behind()
        return _tightest(rising, row, size) if lag >= LAG else rising[:size]
    due = takewhile(lambda row: ready.times_passed_over(row) >= due_from, ready)
    chosen = dict.fromkeys(islice(due, rows_max))
    window = _tightest(rising, oldest, size)
    nearest = sorted(window, key=lambda row: abs(row.length - oldest.length))
    places = max(size, len(chosen))
    chosen |= dict.fromkeys(nearest)
    return sorted(islice(chosen, places), key=attrgetter("length"))


def _tightest(rising: list[Sequence], row: Sequence, size: int) -> list[Sequence]:
    """Of the windows of `size` rows that contain this one the one of least spread; of several that
    of the longest rows."""
    at = rising.index(row)
    begins = range(max(at - size + 1, 0), min(at, len(rising) - size) + 1)

    def spread(begin: int) -> tuple[int, int]:
        return rising[begin + size - 1].length - rising[begin].length, -begin

    begin = min(begins, key=spread)
    return rising[begin : begin + size]


def may_step(ready: int, stepping: int, joining: int, rows_max: int, short_gap: bool) -> bool:
    """Whether a batch of steps is worth dispatching now, or should wait for rows in flight. Needs a
    ready row.

    A replica without any batch never waits. Beside a batch of steps a full one goes, and beside a
    full one also half of one: with no more rows than one batch holds all go together, for two
    fragments would take turns for ever and never merge. Behind a prefill alone, half of the batch
    that it will be part of is enough: the rows being filled join one step later, and the replica
    has no gap. With a short gap (`DraftPolicy.short_gap`) the others wait, and all step together.
    """
    if stepping:
        return ready >= rows_max or (stepping >= rows_max and 2 * ready >= rows_max)
    if joining and short_gap:
        return False
    return 2 * ready >= min(ready + joining, rows_max)
