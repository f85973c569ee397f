"""Where a batch is cut because its rows lie too far apart to read together.

Rows that read their KV cache as one read as far as the longest of them. So a short row among long
ones pays for their length, and from some spread on two steps, each with its own fixed cost, take
less time than one for all: how much spread so many rows are worth is a matter of cost. Replicas
that read each row as far as it goes have no such spread.

Pure arithmetic over lengths; what one more step is worth, in KV positions, is said by the policy.
"""

from __future__ import annotations

from collections.abc import Sequence


def part_of(lengths: Sequence[int], at: int, apart: float) -> tuple[int, int]:
    """(begin, end) of the rows that step together with row `at`, of rows by rising length.

    The rows are cut where that saves most KV positions, if it saves more than `apart`, those whose
    reading takes as long as one more step; and then so is the part with the row. O(rows) for each
    cut.
    """
    begin, end = 0, len(lengths)
    while True:
        longest = lengths[end - 1]
        saved, cut = 0, end
        for first in range(begin + 1, end):
            # The rows before it need not read as far as the longest.
            less = (first - begin) * (longest - lengths[first - 1])
            if less > saved:
                saved, cut = less, first
        if cut == end or saved <= apart:
            return begin, end
        begin, end = (begin, cut) if at < cut else (cut, end)
