"""Which rows step together: the tightest window of a replica's ready rows, with a bounded wait.

Knows lengths and ages of rows, nothing else of a sequence.

Groups. Let R be the rows of a replica that step (ready or stepping), G = ceil(R / rows_max) the
least number of groups that hold them, and ceil(R / G) the ideal size: groups are balanced rather
than one full and one with the rest. Only when G is 1 do all rows belong in one group; then a
fragment never runs as a second order beside the first, for two half groups would alternate for
ever and never merge.

Choice. A row is passed over whenever a speculate order is dispatched on its replica while it is
ready and not in it. Let w be the config's `wait_rounds`. With `oldest` the row that became ready
first, and so was passed over most:

1. nobody was passed over (w - 1.5) * G times: of the windows that are tight, the one of the
   shortest rows. Tight is one whose spread is at most LEVEL of what a window would have if all
   ready rows lay evenly. So those behind catch up with the next ones and then go on with them:
   lengths level out, which no choice by spread alone brings about. Where no window is tight, the
   one of least spread; of several, the one with the oldest row;
2. the oldest was: the window of least spread that contains it (it anchors the window);
3. the oldest was passed over (w - 1) * G times: the rows_max oldest rows, whatever their spread.

Measured (64 residents of 16 to 256 tokens, groups of 8, 4 draft tokens): KV positions read beyond a
row's own, least spread alone against this: 7.1 % and 4.9 % until the pool is empty, 6.9 % and 5.4 %
with new ones coming in; the longest wait is 26 orders, of 32 allowed.

The bound. No row is passed over more than w * G - 1 times in a row, G taken at its largest during
the wait: a round, in which every row could step once, is G orders, so none waits for more than w
rounds. Rows that became ready before a row s only get fewer. Once s has been passed over
(w - 1) * G times, so have they, and every further order takes the rows_max oldest; s and those
before it are at most R rows, so s is in one of the next G orders: at most G - 1 more passes. When
one row is overdue at a time, rule 2 serves it; rule 3 is there for the case that many are, and is
rare: it costs spread. With w = 1 rows go in the order in which they became ready, which is what
EQSPEC without grouping does (arXiv 2510.22876).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import sub

LEVEL = 0.4
"""Share of an even window's spread up to which a window is tight. Tried from 0.2 to 1."""

TIES_MAX = 16
"""Windows of equal spread that are compared by age; the leftmost ones, to bound the work."""

_Key = tuple[int, int, str]
"""(length, ready number, sequence id): within one length the oldest comes first."""


def groups_needed(rows: int, rows_max: int) -> int:
    """G: the least number of groups that hold all rows."""
    return -(-rows // rows_max)


def ideal_size(rows: int, rows_max: int) -> int:
    """Rows of a balanced group: ceil(R / G)."""
    groups = groups_needed(rows, rows_max)
    return -(-rows // groups) if groups else 0


def passes_bound(rows: int, rows_max: int, wait_rounds: int) -> int:
    """How often at most a ready row is passed over in a row, with `rows` rows on its replica."""
    return max(wait_rounds * groups_needed(rows, rows_max) - 1, 0)


def may_step(
    ready: int, stepping: int, prefilling: int, orders_in_flight: int, rows_max: int
) -> bool:
    """Whether a speculate order is worth dispatching now, or should wait for rows in flight.

    A replica without any order never waits. Beside an order of steps only a whole group of its
    own goes. Behind a prefill alone, half of the group that it will be part of is enough: the
    rows being filled join one step later, and the replica has no gap.
    """
    if ready == 0:
        return False
    if orders_in_flight == 0:
        return True
    if stepping:
        # With G = 1 this asks for all rows, and some are stepping: a fragment waits.
        return ready >= (ready + stepping) // groups_needed(ready + stepping, rows_max)
    return 2 * ready >= min(ready + prefilling, rows_max)


class ReadyRows:
    """The ready rows of one replica, by length and by age."""

    def __init__(self) -> None:
        self._by_length: list[_Key] = []
        self._lengths: list[int] = []
        """The lengths alone: a window is sought in every order, among all ready rows."""
        self._by_age: OrderedDict[str, tuple[_Key, int]] = OrderedDict()
        self._ready_number = 0
        self.orders = 0
        """Speculate orders dispatched on this replica."""

    def __len__(self) -> int:
        return len(self._by_length)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._by_age

    def __iter__(self) -> Iterator[str]:
        """Sequence ids, the oldest first."""
        return iter(self._by_age)

    def lengths(self) -> list[int]:
        """Lengths of all ready rows, rising."""
        return list(self._lengths)

    def add(self, sequence_id: str, length: int) -> None:
        """The row is ready, from now on the youngest. Takes O(log n) comparisons."""
        self._ready_number += 1
        key = (length, self._ready_number, sequence_id)
        # It is the youngest, so it stands behind all of its length.
        at = bisect_right(self._lengths, length)
        self._lengths.insert(at, length)
        self._by_length.insert(at, key)
        self._by_age[sequence_id] = (key, self.orders)

    def remove(self, sequence_id: str) -> None:
        key, _ = self._by_age.pop(sequence_id)
        at = bisect_left(self._by_length, key)
        del self._by_length[at], self._lengths[at]

    def passes(self, sequence_id: str) -> int:
        """How often the row was passed over since it became ready."""
        return self.orders - self._by_age[sequence_id][1]

    def choose(self, size: int, rows_max: int, groups: int, wait_rounds: int) -> list[str]:
        """The next group, shortest row first; nothing is changed.

        `size` is the ideal size, `groups` is G; the group has min(size, ready) rows, or
        min(rows_max, ready) when the oldest rows are taken. Needs at least one ready row.
        """
        oldest = next(iter(self._by_age))
        passes = self.passes(oldest)
        if passes >= (wait_rounds - 1) * groups:
            keys = sorted(self._by_age[row][0] for row in islice(self._by_age, rows_max))
        else:
            overdue = 2 * passes >= (2 * wait_rounds - 3) * groups
            anchor = self._by_age[oldest][0] if overdue else None
            start = self._window(min(size, len(self)), anchor)
            keys = self._by_length[start : start + size]
        return [key[2] for key in keys]

    def take(self, sequence_ids: Iterable[str]) -> None:
        """Removes the rows of an order that is dispatched: it passes the others over."""
        self.orders += 1
        keys = [self._by_age.pop(sequence_id)[0] for sequence_id in sequence_ids]
        keys.sort()
        first = bisect_left(self._by_length, keys[0])
        last = first + len(keys)
        if self._by_length[last - 1 : last] == keys[-1:]:
            # A window, nearly always.
            del self._by_length[first:last], self._lengths[first:last]
            return
        for key in keys:
            at = bisect_left(self._by_length, key)
            del self._by_length[at], self._lengths[at]

    def _window(self, size: int, anchor: _Key | None) -> int:
        """Start of the window: with an anchor the tightest that holds it, else by rule 1."""
        lengths = self._lengths
        first, last = 0, len(lengths) - size
        if anchor is not None:
            at = bisect_left(self._by_length, anchor)
            first, last = max(first, at - size + 1), min(last, at)
        shortest = lengths[first : last + 1]
        longest = lengths[first + size - 1 : last + size]
        spreads = list(map(sub, longest, shortest))
        least = min(spreads)
        if anchor is None:
            tight = LEVEL * (lengths[-1] - lengths[0]) * size / len(lengths)
            if least <= tight:
                return next(start for start, spread in enumerate(spreads) if spread <= tight)
        start = spreads.index(least)
        if anchor is not None or spreads.count(least) == 1:
            return first + start
        best, best_age = start, self._age(start, size)
        for _ in range(TIES_MAX - 1):
            try:
                start = spreads.index(least, start + 1)
            except ValueError:
                break
            age = self._age(start, size)
            if age < best_age:
                best, best_age = start, age
        return best

    def _age(self, start: int, size: int) -> int:
        """The ready number of the window's oldest row."""
        return min(key[1] for key in self._by_length[start : start + size])

    def check_integrity(self) -> None:
        assert self._by_length == sorted(self._by_length), "ready rows are out of order"
        assert self._lengths == [key[0] for key in self._by_length], "lengths of ready rows"
        assert {key[2] for key in self._by_length} == set(self._by_age), "ready rows differ"
        numbers = [key[1] for key, _ in self._by_age.values()]
        assert numbers == sorted(numbers), "ready rows are not in order of age"
