"""Where a pass on a CPU reads and writes: positions, slots, and what attention reads together.

Everything follows from lengths, never from token values. The tokens of all rows stand one after
the other; no row is padded to another's width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any

import numpy as np
import torch

from replicas.invariant.ops import TILE, Arithmetic
from replicas.kv_cache import SCRAP_BLOCK, CacheShape, TokenRange

GROUP_COST_NUMBERS = 32768
"""Keys and values of one layer whose reading takes about as long as the calls of one more group."""
SCORES_MOST = 1 << 20
"""Attention scores of a group, unless one row alone has more: they stay in a processor's cache."""
GATHERED_MOST = 1 << 22
"""Numbers, keys and values of one layer, that a group copies, unless one row alone has more."""


@dataclass(slots=True)
class RowGroup:
    """Rows of a pass with equally many queries, which attention reads together: all of them as far
    as the longest."""

    tokens: Any  # array [rows, width], int64: the queries' places among the tokens of the pass
    blocks: Any  # array [rows, blocks], int64: the blocks to read
    length: int
    """KV positions read per row: those of all its blocks."""
    seen: int
    """Positions, from the first on, that every query sees."""
    hidden: Any  # array [rows, width, length - seen], float32
    """Of the others: 0, or -inf where a query does not see them."""


@dataclass(slots=True)
class PassLayout:
    """Where one forward pass reads and writes."""

    tokens: int
    positions: torch.Tensor  # [padded tokens], int64, within the context
    slots: tuple[Any, Any]  # arrays [padded tokens], int64: block to write, and position in it
    groups: list[RowGroup]
    step: StepLayout | None = None
    """Whose window it is, if it is one: windows of one width differ in their positions alone."""

    @property
    def positions_read(self) -> int:
        """KV positions that all rows read together."""
        return sum(len(group.tokens) * group.length for group in self.groups)


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
        self._arithmetic = arithmetic
        columns = table.numpy()
        every, column = _indices(len(starts), width)
        positions = np.array(starts)[:, None] + column  # [rows, width]
        ends = [start + width for start in starts]
        self._positions = positions
        bounds = min(starts), max(ends)
        self._block, self._offset = _places(columns, every, positions, bounds, shape)
        self._inside = _inside(positions, bounds, shape)
        self._groups = []
        for first, after in _runs(ends, shape, arithmetic, width):
            blocks = _blocks(columns[first:after], max(ends[first:after]), shape, arithmetic)
            length = blocks.shape[1] * shape.block_size
            hidden = _hidden(positions[first:after], min(starts[first:after]), length)
            self._groups.append((first, after, blocks, length, *hidden))

    @property
    def positions(self) -> torch.Tensor:  # [rows, width], int64
        return torch.from_numpy(self._positions)

    def window(self, begin: int, end: int) -> PassLayout:
        """The pass over positions start + begin .. start + end - 1 of each row, row by row."""
        rows, width = len(self._positions), end - begin
        count = rows * width
        padded = self._arithmetic.padded(count)
        places = _grid(rows, width)
        columns = slice(begin, end)
        groups = [
            RowGroup(places[first:after], blocks, length, seen, hidden[:, columns])
            for first, after, blocks, length, seen, hidden in self._groups
        ]
        return PassLayout(
            tokens=count,
            positions=torch.from_numpy(_padded(self._inside[:, columns], padded)),
            slots=(
                _padded(self._block[:, columns], padded),
                _padded(self._offset[:, columns], padded),
            ),
            groups=groups,
            step=self,
        )


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
    padded = arithmetic.padded(count)
    positions = np.concatenate([np.arange(begin, end) for begin, end in ranges])
    rows = np.repeat(np.arange(len(ranges)), lengths)
    bounds = min(begin for begin, _ in ranges), max(end for _, end in ranges)
    block, offset = _places(columns, rows, positions, bounds, shape)
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
            places = np.array([place for _, _, place in some])[:, None] + np.arange(width)
            of_rows = columns[[row for _, row, _ in some]]
            blocks = _blocks(of_rows, some[-1][0], shape, arithmetic)
            length = blocks.shape[1] * shape.block_size
            least = some[0][0] - width
            seen_last = np.array([end for end, _, _ in some])[:, None] + np.arange(-width, 0)
            groups.append(RowGroup(places, blocks, length, *_hidden(seen_last, least, length)))
    return PassLayout(
        tokens=count,
        positions=torch.from_numpy(_padded(_inside(positions, bounds, shape), padded)),
        slots=(_padded(block, padded), _padded(offset, padded)),
        groups=groups,
    )


@lru_cache(maxsize=512)
def _grid(rows: int, width: int) -> Any:  # [rows, width], int64
    """The tokens of a window, in order; read, never changed."""
    return np.arange(rows * width).reshape(rows, width)


@lru_cache(maxsize=512)
def _indices(rows: int, width: int) -> tuple[Any, Any]:  # [rows, 1] and [width], int64
    """Of rows, and of what they have; read, never changed."""
    return np.arange(rows)[:, None], np.arange(width)


def _places(
    columns: Any, rows: Any, positions: Any, bounds: TokenRange, shape: CacheShape
) -> tuple[Any, Any]:
    """Block and place in it of each position of a row, all of them within the bounds; the scrap
    block where it has none."""
    column, offset = np.divmod(positions, shape.block_size)
    if bounds[0] >= 0 and bounds[1] <= columns.shape[1] * shape.block_size:
        return columns[rows, column], offset
    last = columns.shape[1] - 1
    outside = (column < 0) | (column > last)
    return np.where(outside, SCRAP_BLOCK, columns[rows, column.clip(0, last)]), offset


def _inside(positions: Any, bounds: TokenRange, shape: CacheShape) -> Any:
    """Positions within the context, for what only pads."""
    if bounds[0] >= 0 and bounds[1] <= shape.context_len:
        return positions
    return positions.clip(0, shape.context_len - 1)


def _blocks(columns: Any, end: int, shape: CacheShape, arithmetic: Arithmetic) -> Any:
    """The leading blocks of these rows that hold `end` positions, in whole units."""
    unit = lcm(shape.block_size, arithmetic.kv_unit)
    count = -(-end // unit) * unit // shape.block_size
    missing = count - columns.shape[1]
    if missing > 0:
        return np.pad(columns, ((0, 0), (0, missing)), constant_values=SCRAP_BLOCK)
    return columns[:, :count]


def _hidden(positions: Any, least: int, length: int) -> tuple[int, Any]:
    """What every query of these rows sees, and a mask of the rest; see `RowGroup`. `positions`:
    those of the queries, [rows, width], of which `least` is the first."""
    seen = max(least, 0) + 1  # before the first position a query sees that one
    last = positions if least >= 0 else np.maximum(positions, 0)
    beyond = np.arange(seen, length) > last[:, :, None]
    return seen, np.where(beyond, np.float32(-np.inf), np.float32(0))


def _padded(array: Any, size: int) -> Any:  # [size]
    """The numbers in order, then zeros: position 0, and the scrap block."""
    if array.size == size:
        return array.reshape(-1)
    padded = np.zeros(size, np.int64)
    padded[: array.size] = array.reshape(-1)
    return padded


def _runs(
    ends: Iterable[int], shape: CacheShape, arithmetic: Arithmetic, width: int
) -> list[tuple[int, int]]:
    """[first, after) of neighbouring rows that read together; row i reads `ends[i]` positions.

    A group ends where one more row would have the others read more positions than a group costs,
    or all of them would have more than SCORES_MOST scores, or GATHERED_MOST keys and values.
    """
    unit = arithmetic.kv_unit
    numbers = 2 * shape.kv_heads * shape.head_dim  # keys and values of a position
    runs: list[tuple[int, int]] = []
    first, longest, wanted = 0, 0, 0
    index = 0
    for index, end in enumerate(ends):
        reach = -(-end // unit) * unit
        count = index - first
        both = max(longest, reach)
        wasted = both * (count + 1) - (wanted + reach)
        scores = (count + 1) * shape.heads * width * both
        gathered = (count + 1) * both * numbers
        too_large = scores > SCORES_MOST or gathered > GATHERED_MOST
        if count and (wasted * numbers > GROUP_COST_NUMBERS or too_large):
            runs.append((first, index))
            first, longest, wanted = index, reach, reach
        else:
            longest, wanted = both, wanted + reach
    runs.append((first, index + 1))
    return runs
