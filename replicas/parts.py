"""Which rows of a step read their keys and values together.

Rows that read together read as far as the longest of them. Where lengths differ much, it costs less
to read in several parts, each as far as its own longest row, although every part is one more call
per layer. Only attention is divided so: all products go over all rows.

Pure arithmetic over lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """KV positions that rows of these lengths read, gathered, in these parts; none: all as one."""
    read, begin = 0, 0
    for rows in parts or [len(lengths)]:
        read += max(lengths[begin : begin + rows]) * rows
        begin += rows
    return read


def positions_in_place(lengths: Iterable[int], unit: int) -> int:
    """KV positions that rows of these lengths read where they lie, each in whole units of so many
    positions."""
    return sum(-(-length // unit) for length in lengths) * unit


def coarser(lengths: Sequence[int], parts: Sequence[int], part_positions: int | None) -> list[int]:
    """Fewer parts of the same rows, for who pays more for one: neighbours become one where that
    makes them read no more than `part_positions` further KV positions. O(rows)."""
    if not parts or part_positions is None:
        return []
    merged: list[int] = []
    begin, longest = 0, 0
    for rows in parts:
        most = max(lengths[begin : begin + rows])
        begin += rows
        if merged:
            both = max(longest, most)
            if merged[-1] * (both - longest) + rows * (both - most) <= part_positions:
                merged[-1] += rows
                longest = both
                continue
        merged.append(rows)
        longest = most
    return [] if len(merged) == 1 else merged


def _divided(lengths: Sequence[int], begin: int, part_positions: int) -> list[int]:
    """Ends of the parts of these rows, the first of which is row `begin` of all."""
    rows = len(lengths)
    most = list(accumulate(lengths, max))
    least = list(accumulate(reversed(lengths), max))[::-1]
    whole = most[-1]
    would_save = [
        before * (whole - shorter) + (rows - before) * (whole - later)
        for before, shorter, later in zip(range(1, rows), most, least[1:], strict=False)
    ]
    saved = max(would_save, default=0)
    if saved <= part_positions:
        return [begin + rows]
    # The last of equals, that is.
    at = rows - 1 - would_save[::-1].index(saved)
    return [
        *_divided(lengths[:at], begin, part_positions),
        *_divided(lengths[at:], begin + at, part_positions),
    ]
