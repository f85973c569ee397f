"""The ready rows of one replica: by age, by length, and by the steps that they have had.

A record, not a policy: which rows step next is decided by `batching.grouping`.

Time is counted in steps of an equal share: a batch is worth its rows over all that step. A row's
turn is that time when it came, and one more for each step that it has had; its lag is by how much
the time is ahead of its turn. A row that has committed nothing yet is behind all others, for a
client waits for its first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Rows
from math import inf, isfinite
from operator import attrgetter

from scheduler.state.sequence import Sequence


class ReadyRows:
    """Rows that a batch may take; the length of a row does not change while it is ready."""

    def __init__(self) -> None:
        self._since: dict[Sequence, int] = {}
        """Batches dispatched before a row became ready; the oldest row first."""
        self._share = 0.0
        self.batches = 0
        """Batches of steps dispatched on this replica."""

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, row: object) -> bool:
        return row in self._since

    def __iter__(self) -> Iterator[Sequence]:
        """The oldest first."""
        return iter(self._since)

    def times_passed_over(self, row: Sequence) -> int:
        """How often the row was passed over since it became ready."""
        return self.batches - self._since[row]

    def most_behind(self) -> tuple[float, Sequence]:
        """The largest lag [steps], and its row; of several the oldest. Needs a ready row."""
        row = min(self._since, key=attrgetter("turn"))
        return self._share - row.turn, row

    def by_length(self) -> list[Sequence]:
        """All of them, shortest first; of one length the oldest first."""
        # A sort of hundreds takes no longer than an index that every batch changes.
        return sorted(self._since, key=attrgetter("length"))

    def add(self, row: Sequence) -> None:
        """The row is ready, from now on the youngest."""
        self._since[row] = self.batches
        if not row.committed:
            row.turn = -inf
        elif row.turn == -inf:
            row.turn = self._share

    def remove(self, row: Sequence) -> None:
        """It is not ready any more, though it may be again."""
        del self._since[row]

    def take(self, rows: Rows[Sequence], of: int) -> None:
        """Removes the rows of a batch that is dispatched: it passes the others over. `of`: all rows
        that step on the replica."""
        self.batches += 1
        self._share += len(rows) / of
        for row in rows:
            self.remove(row)
            row.turn = (self._share if row.turn == -inf else row.turn) + 1.0

    def check_integrity(self) -> None:
        """Asserts that the rows are in order of age, and each has its turn."""
        since = list(self._since.values())
        assert since == sorted(since), "ready rows are not in order of age"
        assert all(isfinite(row.turn) or not row.committed for row in self._since), "no turn"
