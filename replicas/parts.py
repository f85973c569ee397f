"""Which rows of a step read their keys and values together.

Rows that read together read as far as the longest of them. Where lengths differ much, it costs less
to read in several parts, each as far as its own longest row, although every part is one more call
per layer. Only attention is divided so: all products go over all rows.

Pure arithmetic over lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def part_rows(lengths: Sequence[int], part_positions: int | None) -> list[int]:
    """Rows of each part, in order; empty: all rows are one.

    A part is divided where that saves most, if it saves more than `part_positions` KV positions,
    and then its parts likewise; `None`: it never pays. `lengths` may stand in any order, and parts
    are neighbours in it, so rising ones are best. O(rows) for each part.
    """
    if part_positions is None or max(lengths) * len(lengths) - sum(lengths) <= part_positions:
        return []
    ends = [0, *_divided(lengths, 0, part_positions)]
    return [] if len(ends) == 2 else [end - begin for begin, end in pairwise(ends)]


def positions_read(lengths: Sequence[int], parts: Sequence[int]) -> int:
    """KV positions that rows of these lengths read in these parts; no parts: all as one."""
    read, begin = 0, 0
    for rows in parts or [len(lengths)]:
        read += max(lengths[begin : begin + rows]) * rows
        begin += rows
    return read


def _divided(lengths: Sequence[int], begin: int, part_positions: int) -> list[int]:
    """Ends of the parts of these rows, the first of which is row `begin` of all."""
    rows = len(lengths)
    most = list(accumulate(lengths, max))
    least = list(accumulate(reversed(lengths), max))[::-1]
    whole = most[-1]
    saved = at = 0
    for rows_before in range(1, rows):
        would_save = rows_before * (whole - most[rows_before - 1])
        would_save += (rows - rows_before) * (whole - least[rows_before])
        if would_save >= saved:
            saved, at = would_save, rows_before
    if saved <= part_positions:
        return [begin + rows]
    return [
        *_divided(lengths[:at], begin, part_positions),
        *_divided(lengths[at:], begin + at, part_positions),
    ]
