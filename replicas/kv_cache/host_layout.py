"""Where a pass on a CPU reads and writes: positions, slots, and what attention reads together.

Everything follows from lengths, never from token values. The tokens of all rows stand one after
the other; no row is padded to another's width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replicas.invariant.ops import TILE, Arithmetic

if TYPE_CHECKING:
    from replicas.verification import Selection

SCRAP_BLOCK = 0
"""A block of no sequence: padding is written there and never attended to."""
GROUP_COST_NUMBERS = 8192
"""Keys and values of one layer whose reading takes about as long as the calls of one more group."""
SCORES_MOST = 1 << 20
"""Attention scores of a group, unless one row alone has more: they stay in a processor's cache."""

TokenRange = tuple[int, int]
"""Positions [begin, end) of a row."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What index arithmetic must know of a replica's cache and model."""

    block_size: int
    context_len: int
    """Positions in use are below it; padding is clamped to it."""
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group_cost(self) -> int:
        """KV positions whose reading takes about as long as the calls of one more group."""
        return max(1, GROUP_COST_NUMBERS // (2 * self.kv_heads * self.head_dim))


@dataclass(slots=True)
class RowGroup:
    """Rows of a pass with equally many queries, which attention reads together: all of them as far
    as the longest."""

    tokens: Any  # array [rows, width], int64: the queries' places among the tokens of the pass
    begins: Any  # array [rows], int64: position of each row's first query
    blocks: Any  # array [rows, blocks], int64: the blocks to read
    length: int
    """KV positions read per row: those of all its blocks."""


@dataclass(slots=True)
class PassLayout:
    """Where one forward pass reads and writes."""

    tokens: int
    positions: torch.Tensor  # [padded tokens], int64, within the context
    slots: tuple[Any, Any]  # arrays [padded tokens], int64: block to write, and position in it
    groups: list[RowGroup]
    plain: tuple[int, int, int] | None = None
    """(rows, width, groups), if the groups hold the rows in order and each row `width` tokens."""

    @property
    def positions_read(self) -> int:
        """KV positions that all rows read together."""
        return sum(len(group.begins) * group.length for group in self.groups)


class StepLayout:
    """The passes of one step: windows over the `width` positions that follow each row's start.

    A start may be -1, before the first token. Positions outside a row are written to the scrap
    block.
    """

    def __init__(
        self,
        table: torch.Tensor,  # [rows, blocks], int64, on the host
        starts: Sequence[int],  # [rows]
        width: int,
        shape: CacheShape,
        arithmetic: Arithmetic,
    ) -> None:
        self._shape = shape
        self._arithmetic = arithmetic
        self._table = table
        self._starts = starts
        columns = table.numpy()
        begins = np.array(starts)
        self._begins = begins
        self._positions = begins[:, None] + np.arange(width)  # [rows, width]
        self._slots = _slots(columns, np.arange(len(begins))[:, None], self._positions, shape)
        self._inside = self._positions.clip(0, shape.context_len - 1)
        ends = [start + width for start in starts]
        self._groups = [
            (first, after, _blocks(columns[first:after], max(ends[first:after]), shape, arithmetic))
            for first, after in _runs(ends, shape, arithmetic, width)
        ]

    @property
    def positions(self) -> torch.Tensor:  # [rows, width], int64
        return torch.from_numpy(self._positions)

    def window(self, begin: int, end: int) -> PassLayout:
        """The pass over positions start + begin .. start + end - 1 of each row, row by row."""
        rows, width = len(self._begins), end - begin
        count = rows * width
        beyond = (0, self._arithmetic.padded(count) - count)
        places = np.arange(count).reshape(rows, width)
        groups = [
            RowGroup(
                tokens=places[first:after],
                begins=self._begins[first:after] + begin,
                blocks=blocks,
                length=blocks.shape[1] * self._shape.block_size,
            )
            for first, after, blocks in self._groups
        ]
        return PassLayout(
            tokens=count,
            positions=torch.from_numpy(_pad(self._inside[:, begin:end].reshape(-1), beyond)),
            slots=_divided(_pad(self._slots[:, begin:end].reshape(-1), beyond), self._shape),
            groups=groups,
            plain=(rows, width, len(groups)) if len(groups) == 1 else None,
        )

    def some(self, selection: Selection) -> PassLayout:
        """The pass over some positions of each row, all from its start on."""
        counts = (selection.seen + 1).tolist()
        ranges = [(start, start + count) for start, count in zip(self._starts, counts, strict=True)]
        return ranges_layout(self._table, ranges, self._shape, self._arithmetic)


def ranges_layout(
    table: torch.Tensor,  # [rows, blocks], int64, on the host
    ranges: Sequence[TokenRange],  # of each row; none is empty
    shape: CacheShape,
    arithmetic: Arithmetic,
) -> PassLayout:
    """The pass over all tokens of the ranges, row by row; a start may be -1 as in a step.

    Queries are read in tiles of at most TILE per row, each as far as it reaches.
    """
    columns = table.numpy()
    lengths = [end - begin for begin, end in ranges]
    count = sum(lengths)
    beyond = (0, arithmetic.padded(count) - count)
    positions = np.concatenate([np.arange(begin, end) for begin, end in ranges])
    rows = np.repeat(np.arange(len(ranges)), lengths)
    slots = _slots(columns, rows, positions, shape)
    tiles: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    """By number of queries: (end, row, place of the first query)."""
    place = 0
    for row, (begin, end) in enumerate(ranges):
        for first in range(begin, end, TILE):
            after = min(first + TILE, end)
            tiles[after - first].append((after, row, place))
            place += after - first
    groups = []
    for width, alike in tiles.items():
        alike.sort()
        ends = [end for end, _, _ in alike]
        for first, after in _runs(ends, shape, arithmetic, width):
            some = alike[first:after]
            places = np.array([place for _, _, place in some])
            groups.append(
                RowGroup(
                    tokens=places[:, None] + np.arange(width),
                    begins=np.array([end - width for end, _, _ in some]),
                    blocks=(
                        blocks := _blocks(
                            columns[[row for _, row, _ in some]], some[-1][0], shape, arithmetic
                        )
                    ),
                    length=blocks.shape[1] * shape.block_size,
                )
            )
    return PassLayout(
        tokens=count,
        positions=torch.from_numpy(_pad(positions.clip(0, shape.context_len - 1), beyond)),
        slots=_divided(_pad(slots, beyond), shape),
        groups=groups,
    )


def passes(
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


def _slots(columns: Any, rows: Any, positions: Any, shape: CacheShape) -> Any:
    """Flat KV positions of a row's positions; the scrap block's where it has none."""
    size = shape.block_size
    column = positions // size
    outside = (column < 0) | (column >= columns.shape[1])
    block = np.where(outside, SCRAP_BLOCK, columns[rows, column.clip(0, columns.shape[1] - 1)])
    return block * size + positions % size


def _divided(slots: Any, shape: CacheShape) -> tuple[Any, Any]:
    block, offset = np.divmod(slots, shape.block_size)
    return block, offset


def _blocks(columns: Any, end: int, shape: CacheShape, arithmetic: Arithmetic) -> Any:
    """The leading blocks of these rows that hold `end` positions, in whole units."""
    unit = lcm(shape.block_size, arithmetic.kv_unit)
    count = -(-end // unit) * unit // shape.block_size
    missing = count - columns.shape[1]
    if missing > 0:
        return np.pad(columns, ((0, 0), (0, missing)), constant_values=SCRAP_BLOCK)
    return columns[:, :count]


def _pad(array: Any, beyond: tuple[int, int]) -> Any:
    return np.pad(array, beyond) if beyond[1] else array


def _runs(
    ends: Iterable[int], shape: CacheShape, arithmetic: Arithmetic, width: int
) -> list[tuple[int, int]]:
    """[first, after) of neighbouring rows that read together; row i reads `ends[i]` positions.

    A group ends where one more row would have the others read more positions than a group costs,
    or all of them have more scores than SCORES_MOST.
    """
    unit = arithmetic.kv_unit
    runs: list[tuple[int, int]] = []
    first, longest, wanted = 0, 0, 0
    index = 0
    for index, end in enumerate(ends):
        reach = -(-end // unit) * unit
        count = index - first
        both = max(longest, reach)
        wasted = both * (count + 1) - (wanted + reach)
        scores = (count + 1) * shape.heads * width * both
        if count and (wasted > shape.group_cost or scores > SCORES_MOST):
            runs.append((first, index))
            first, longest, wanted = index, reach, reach
        else:
            longest, wanted = both, wanted + reach
    runs.append((first, index + 1))
    return runs
