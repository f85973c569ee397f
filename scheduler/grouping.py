"""Which rows step together: the tightest window of a replica's ready rows, with a bounded wait.

Knows lengths, ages and limits of rows; a row itself is any object that a dict takes as a key.

Groups. Let R be the rows of a replica that step (ready or stepping) and G = ceil(R / rows_max) the
least number of groups that hold them. A group is full: rows_max rows. With less than two full
groups of rows there are two ways, and which commits more is a matter of cost: full groups, so that
the others wait and nothing can be prepared while one runs; or two halves that take turns. With one
group of rows they all go together: a fragment never runs as a second batch beside the first, for
two half groups would alternate for ever and never merge.

Choice. A row is passed over whenever a speculate batch is dispatched on its replica while it is
ready and not in it. Let w be the config's `wait_rounds`. With `oldest` the row that became ready
first, and so was passed over most:

1. nobody was passed over (w - 1.5) * G times, nor had too few steps: of the windows that are
   tight, the one of the shortest rows. Tight is one whose spread is at most `shelf.LEVEL` of what a
   window would have if all ready rows lay evenly. So those behind catch up with the next ones and
   then go on with them: lengths level out, which no choice by spread alone brings about. Where no
   window is tight, the one of least spread; of several, the one with the oldest row;
2. the oldest was: the window of least spread that contains it (it anchors the window), of several
   the longest, for rule 1 is for the shortest. So does, before rule 1, the oldest row that has
   committed nothing yet: somebody waits for a first token. And so does, after that one, the row
   that has had too few steps in the long run, see `lags`: who always waits a little longer than the
   others ends much later. Under lasting load that is most groups, where lengths are mixed;
3. the oldest was passed over (w - 1) * G times: the rows_max oldest rows, whatever their spread.

At the end, before rule 2 for too few steps, some of the rows are chosen by what they have left; see
`ending`.

Measured with 64 residents of 16 to 256 tokens, 64 new ones each and groups of 8: of the KV
positions that are read, 36 % are beyond a row's own in order of arrival (w = 1), 19 % with w = 2,
9 % with 3, 8 % with 4 and with 5 (`lockstep simulate --replicas 1 --in-flight 64 --prompt-tokens
16..256 --new-tokens 64 --requests 1000`).

That is little above what choice can bring: with the demo pair's own acceptance, 64 residents of
eight lengths, the full pool kept filled, and before shares counted, 10 % with w = 3 and 6 % with 4;
equal turns of neighbours 9 %; of 24 ways to weigh a window's padding against the age of its rows
the best 6 %. What is left is the replica's to save: rows that lie far apart need not read together
(`kv_positions_read`), or, where they must, it is a matter of cost: a group of rule 1 or 2 is cut
where its rows lie so far apart that two steps take less time than one, and its row of rule 2, or
its oldest, says which part goes (see `cutting`). The other part waits as if it had been passed
over.

Kinds. A row is of one of two kinds: the draft is right about it at times, or hardly ever; see
`acceptance`. A step drafts as many tokens for all its rows, so rows of one kind belong together:
rules 1 and 2 look at the oldest row's kind alone, or else the other one, if there are rows enough
for a group, and at both kinds together only if neither has.

Narrow rows. A request, or the config, may limit the rows of a row's group or their spread (see
`narrowing`). G is then the groups of the free rows and those of the narrow ones. Rule 3 takes the
oldest row, then those with the same limits, then the others, each if it fits. Before it, the oldest
narrow row anchors a group once in a round, or where there is no full group of free rows: of those
with the same limits, then of narrow ones that are no narrower, then of free and of narrower ones,
always the nearest, as far as they fit. So narrow rows need few batches, and free ones step in full
groups. That round, and those of rule 2, are counted with the groups that narrow rows make as their
lengths are now; G counts one for each row that limits the spread. Otherwise free rows go by rules 1
and 2, and narrow ones that fit have the places that are left.

The bound. No row is passed over more than w * G - 1 times in a row, G taken at its largest during
the wait: a round, in which every row could step once, is G batches, so none waits for more than w
rounds. Rows that became ready before a row s only get fewer. Once s has been passed over
(w - 1) * G times, so have they, and every further batch takes the rows_max oldest; s and those
before it are at most R rows, so s is in one of the next G batches: at most G - 1 more passes. (With
narrow rows, too: each batch takes rows_max free rows, or as many with the same limits as those
allow, so each of these kinds has no more batches than G counts for it.) When
one row is overdue at a time, rule 2 serves it; rule 3 is there for the case that many are, and is
rare: it costs spread. With w = 1 rows go in the order in which they became ready, which is what
EQSPEC without grouping does (arXiv 2510.22876).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from heapq import merge
from itertools import islice
from typing import Generic, TypeVar

from scheduler.lags import Lags
from scheduler.narrowing import Group, Limits
from scheduler.shelf import Shelf

NARROW_EARLY = 2
"""So many batches before a round is over the oldest narrow row is due: there is one in flight and
one behind it when it becomes ready."""

NARROW = 2
"""Kind of the ready rows that are narrow; see `narrowing`."""

Row = TypeVar("Row", bound=Hashable)

_Key = tuple[int, int, int]
"""(length, batches dispatched before, kind) of a row when it became ready."""


def groups_needed(rows: int, rows_max: int) -> int:
    """G: the least number of groups that hold all rows."""
    return -(-rows // rows_max)


def group_size(rows: int, rows_max: int, halves: bool) -> tuple[int, int]:
    """Rows of a group, and how many must be ready for one to go beside a batch of steps.

    `halves`: less than two full groups of rows take turns by halves.
    """
    if rows <= rows_max:
        return rows, rows
    if halves and rows < 2 * rows_max:
        return -(-rows // 2), rows // 2
    return rows_max, rows_max


def passes_bound(rows: int, rows_max: int, wait_rounds: int, narrow: int = 0) -> int:
    """How often at most a ready row is passed over in a row, with `rows` free rows on its replica
    and narrow ones for so many groups."""
    return max(wait_rounds * (groups_needed(rows, rows_max) + narrow) - 1, 0)


def may_step(
    ready: int, stepping: int, joining: int, batches_in_flight: int, beside: int, rows_max: int
) -> bool:
    """Whether a speculate batch is worth dispatching now, or should wait for rows in flight.

    A replica without any batch never waits. Beside a batch of steps only a whole group of its
    own goes: `beside` rows, see `group_size`. Behind a prefill alone, half of the group that it
    will be part of is enough: the rows being filled join one step later, and the replica has no
    gap.
    """
    if ready == 0:
        return False
    if batches_in_flight == 0:
        return True
    if stepping:
        # With one group `beside` is all rows, and some are stepping: a fragment waits.
        return ready >= beside
    return 2 * ready >= min(ready + joining, rows_max)


class ReadyRows(Generic[Row]):
    """The ready rows of one replica, by kind and length, and by age."""

    __slots__ = ("_by_age", "_narrow", "_new", "_shelves", "lags", "batches")

    def __init__(self) -> None:
        self._shelves: tuple[Shelf[Row], ...] = (Shelf(), Shelf(), Shelf())
        """Free rows of kind 0 and 1, and narrow ones."""
        self._by_age: dict[Row, _Key] = {}
        """The oldest first."""
        self._narrow: dict[Row, Limits] = {}
        """Limits of the narrow rows, the oldest first."""
        self._new: dict[Row, None] = {}
        """Rows whose first token somebody waits for, the oldest first."""
        self.batches = 0
        """Speculate batches dispatched on this replica."""
        self.lags: Lags[Row] = Lags()
        """Of the free rows, ready or not."""

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, row: object) -> bool:
        return row in self._by_age

    def __iter__(self) -> Iterator[Row]:
        """The oldest first."""
        return iter(self._by_age)

    def lengths(self) -> list[int]:
        """Lengths of all ready rows, rising."""
        return list(merge(*(shelf.lengths for shelf in self._shelves)))

    def add(
        self,
        row: Row,
        length: int,
        kind: int = 0,
        new: bool = False,
        limits: Limits | None = None,
    ) -> None:
        """The row is ready, from now on the youngest. Takes O(log n) comparisons."""
        if limits is not None:
            kind = NARROW
            self._narrow[row] = limits
        else:
            self.lags.become_ready((row,))
        self._add_all([(row, length, kind)])
        if new:
            self._new[row] = None

    def add_all(self, rows: list[tuple[Row, int, int]]) -> None:
        """The same for rows (row, length, kind) that nobody limits or waits for, in this order."""
        self.lags.become_ready([row for row, _, _ in rows])
        self._add_all(rows)

    def _add_all(self, rows: list[tuple[Row, int, int]]) -> None:
        shelves, by_age, batches = self._shelves, self._by_age, self.batches
        for row, length, kind in rows:
            # It is the youngest, so it stands behind all of its length.
            shelf = shelves[kind]
            at = bisect_right(shelf.lengths, length)
            shelf.lengths.insert(at, length)
            shelf.rows.insert(at, row)
            by_age[row] = (length, batches, kind)

    def remove(self, row: Row) -> None:
        length, _, kind = self._by_age.pop(row)
        self._shelves[kind].remove(row, length)
        self._new.pop(row, None)
        self._narrow.pop(row, None)

    def passes(self, row: Row) -> int:
        """How often the row was passed over since it became ready."""
        return self.batches - self._by_age[row][1]

    def is_due(self, wait_rounds: int, groups: int) -> bool:
        """Whether the oldest row was passed over so often that rule 2 or 3 takes it."""
        return self._is_due(next(iter(self._by_age)), wait_rounds, groups)

    def _is_due(self, row: Row, wait_rounds: int, groups: int) -> bool:
        return 2 * self.passes(row) >= (2 * wait_rounds - 3) * groups

    def _anchor(self, oldest: Row, wait_rounds: int, groups: int) -> Row | None:
        """Whom rule 2 is for, `oldest` being the oldest row that it can take."""
        if self._is_due(oldest, wait_rounds, groups):
            return oldest
        if self._new:
            return next(iter(self._new))
        return self.lags.due(self._by_age)

    def is_overdue(self, wait_rounds: int, groups: int) -> bool:
        """Whether it was passed over so often that rule 3 takes it."""
        return self.passes(next(iter(self._by_age))) >= (wait_rounds - 1) * groups

    def anchor_of(self, rows: Iterable[Row], wait_rounds: int, groups: int) -> Row:
        """Of a group that was chosen just now the row that it is for, or else its oldest."""
        some = set(rows)
        anchor = self._anchor(next(iter(self._by_age)), wait_rounds, groups)
        if anchor is not None and anchor in some:
            return anchor
        return next(row for row in self._by_age if row in some)

    def ordered(self, rows: Iterable[Row]) -> list[Row]:
        """Ready rows as `choose` gives them."""
        some = set(rows)
        return self._by_length(row for row in self._by_age if row in some)

    def choose(
        self, size: int, rows_max: int, groups: int, wait_rounds: int, turns: int | None = None
    ) -> list[Row]:
        """The next group, shortest row first; nothing is changed.

        `size` is that of a group, `groups` is G; the group has min(size, ready) rows, or
        min(rows_max, ready) when the oldest rows are taken. Needs at least one ready row.
        With narrow rows among the ready ones it may have fewer; `turns` are the batches a round
        takes as lengths are now, at most G, where that is known.
        """
        if self._narrow:
            return self._choose_narrowly(size, rows_max, groups, wait_rounds, turns or groups)
        by_age = self._by_age
        if self.is_overdue(wait_rounds, groups):
            return self._by_length(islice(by_age, rows_max))
        return self._window(next(iter(by_age)), size, groups, wait_rounds)

    def _window(self, oldest: Row, size: int, groups: int, wait_rounds: int) -> list[Row]:
        """Free rows by rules 1 and 2, `oldest` being the oldest of them."""
        by_age = self._by_age
        anchor = self._anchor(oldest, wait_rounds, groups)
        if anchor is None:
            return self._shelf(by_age[oldest][2], size, False).window(size, None, by_age)
        length, _, kind = by_age[anchor]
        return self._shelf(kind, size, True).window(size, (anchor, length), by_age)

    def _choose_narrowly(
        self, size: int, rows_max: int, groups: int, wait_rounds: int, turns: int
    ) -> list[Row]:
        """The next group where narrow rows are ready; O(n log n) for n ready rows."""
        by_age = self._by_age
        oldest = next(iter(by_age))
        likes = self._narrow.get(oldest)
        narrow, new = next(iter(self._narrow)), next(iter(self._new), None)
        free = len(by_age) - len(self._narrow)
        if self.passes(oldest) >= (wait_rounds - 1) * groups:
            # Its likes before the others: that bounds how many batches all of them need.
            row_batch = sorted(by_age, key=lambda row: self._narrow.get(row) != likes)
        elif not free or free < size or self.passes(narrow) >= turns - NARROW_EARLY:
            row_batch = self._nearest(narrow)
        elif new in self._narrow:
            row_batch = self._nearest(new)
        else:
            free_row = next(one for one in by_age if one not in self._narrow)
            row_batch = [*self._window(free_row, size, turns, wait_rounds), *self._narrow]
        group: Group[Row] = Group(rows_max)
        for row in row_batch:
            if group.full:
                break
            group.add(row, by_age[row][0], self._narrow.get(row))
        return self.ordered(group.rows)

    def _nearest(self, anchor: Row) -> list[Row]:
        """All rows, those first who would otherwise need another small group, by their distance
        from this narrow one; the oldest first where that is equal."""
        length = self._by_age[anchor][0]
        own = self._narrow[anchor]

        def rank(row: Row) -> tuple[int, int]:
            limits = self._narrow.get(row)
            distance = abs(self._by_age[row][0] - length)
            if limits is None:
                return 2, distance
            if not limits.as_wide_as(own):
                # It would make the group smaller.
                return 3, distance
            return int(limits != own), distance

        others = sorted(self._by_age, key=rank)
        others.remove(anchor)
        return [anchor, *others]

    def _shelf(self, kind: int, size: int, anchored: bool) -> Shelf[Row]:
        """Where the next group is sought, `kind` being that of the oldest row or of the anchor."""
        own, other = self._shelves[kind], self._shelves[1 - kind]
        if len(own) >= size or not other.rows:
            return own
        if not anchored and len(other) >= size:
            return other
        both = self._by_length(row for row, key in self._by_age.items() if key[2] != NARROW)
        return Shelf([self._by_age[row][0] for row in both], both)

    def _by_length(self, rows: Iterable[Row]) -> list[Row]:
        """Rows that come by age, shortest first and of one length the oldest."""
        return sorted(rows, key=lambda row: self._by_age[row][0])

    def take(self, rows: list[Row], of: int) -> None:
        """Removes the rows of a batch that is dispatched, as `choose` gave them: it passes the
        others over. `of`: free rows that step on the replica, those of the batch among them."""
        self.batches += 1
        narrow = self._narrow
        free = [row for row in rows if row not in narrow] if narrow else rows
        if free:
            self.lags.step(free, of)
        keys = list(map(self._by_age.pop, rows))
        length, _, kind = keys[0]
        # A window, nearly always.
        if not self._shelves[kind].remove_window(rows, length):
            for row, (length, _, kind) in zip(rows, keys, strict=True):
                self._shelves[kind].remove(row, length)
        for rare in (self._new, self._narrow):
            if rare:
                for row in rows:
                    rare.pop(row, None)

    def check_integrity(self) -> None:
        ages = {row: age for age, row in enumerate(self._by_age)}
        rows: set[Row] = set()
        for kind, shelf in enumerate(self._shelves):
            keys = [self._by_age[row] for row in shelf.rows]
            assert list(shelf.lengths) == [key[0] for key in keys], "lengths of ready rows"
            assert all(key[2] == kind for key in keys), "kinds of ready rows"
            places = [(key[0], ages[row]) for key, row in zip(keys, shelf.rows, strict=True)]
            assert places == sorted(places), "ready rows are out of order"
            rows.update(shelf.rows)
        assert rows == set(self._by_age), "ready rows differ"
        assert sum(map(len, self._shelves)) == len(rows), "a ready row is there twice"
        assert self._new.keys() <= self._by_age.keys(), "a row that is not there is new"
        narrow = [row for row, key in self._by_age.items() if key[2] == NARROW]
        assert narrow == list(self._narrow), "narrow rows"
        batches = [key[1] for key in self._by_age.values()]
        assert batches == sorted(batches), "ready rows are not in order of age"
