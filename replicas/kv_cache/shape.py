"""What index arithmetic must know of a replica's cache and model, and how ranges become passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SCRAP_BLOCK = 0
"""A block of no sequence: padding is written there and never attended to."""

TokenRange = tuple[int, int]
"""Positions [begin, end) of a row."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    block_size: int
    context_len: int
    """Positions in use are below it; padding is clamped to it."""
    heads: int
    kv_heads: int
    head_dim: int
    tile: int = 1
    """A pass on a device computes a multiple of so many tokens."""


def divided_into_passes(
    ranges: Sequence[TokenRange], tokens_most: int
) -> Iterator[list[tuple[int, TokenRange]]]:
    """The ranges in passes of at most so many tokens: which rows, and what of each is in the pass.

    A range goes into several passes, in order, where it fills up one of them.
    """
    one_pass: list[tuple[int, TokenRange]] = []
    left = tokens_most
    for row, (begin, end) in enumerate(ranges):
        while begin < end:
            stop = min(end, begin + left)
            one_pass.append((row, (begin, stop)))
            left -= stop - begin
            begin = stop
            if not left:
                yield one_pass
                one_pass, left = [], tokens_most
    if one_pass:
        yield one_pass
