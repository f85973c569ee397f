"""Where a pass on a CPU reads and writes: positions, slots, and what attention reads together.

Everything follows from lengths, never from token values. The tokens of all rows stand one after
the other; no row is padded to another's width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
        positions = np.array(starts)[:, None] + np.arange(width)  # [rows, width]
        self._positions = positions
        every = np.arange(len(starts))[:, None]
        self._block, self._offset = _places(columns, every, positions, shape)
        self._inside = positions.clip(0, shape.context_len - 1)  # for what only pads
        self._groups = list(_groups(columns, positions, shape, arithmetic))

    @property
    def positions(self) -> torch.Tensor:  # [rows, width], int64
        return torch.from_numpy(self._positions)

    def window(self, begin: int, end: int) -> PassLayout:
        """The pass over positions start + begin .. start + end - 1 of each row, row by row."""
        rows, width = len(self._positions), end - begin
        count = rows * width
        padded = self._arithmetic.padded(count)
        places = np.arange(count).reshape(rows, width)
        columns = slice(begin, end)
        groups = [
            RowGroup(places[some], blocks, length, seen, hidden[:, columns])
            for some, blocks, length, seen, hidden in self._groups
        ]
        return PassLayout(
            tokens=count,
            positions=torch.from_numpy(_padded(self._inside[:, columns], padded)),
            slots=(
                _padded(self._block[:, columns], padded),
                _padded(self._offset[:, columns], padded),
            ),
            groups=groups,
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
    block, offset = _places(columns, rows, positions, shape)
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
        ends, of_rows, places = np.array(sorted(alike)).T
        seen_by = ends[:, None] + np.arange(-width, 0)
        every = places[:, None] + np.arange(width)
        for some, *read in _groups(columns[of_rows], seen_by, shape, arithmetic):
            groups.append(RowGroup(every[some], *read))
    return PassLayout(
        tokens=count,
        positions=torch.from_numpy(_padded(positions.clip(0, shape.context_len - 1), padded)),
        slots=(_padded(block, padded), _padded(offset, padded)),
        groups=groups,
    )


def _places(columns: Any, rows: Any, positions: Any, shape: CacheShape) -> tuple[Any, Any]:
    """Block and place in it of each position of a row; the scrap block where it has none."""
    column, offset = np.divmod(positions, shape.block_size)
    last = columns.shape[1] - 1
    outside = (column < 0) | (column > last)
    return np.where(outside, SCRAP_BLOCK, columns[rows, column.clip(0, last)]), offset


def _blocks(columns: Any, end: int, shape: CacheShape, arithmetic: Arithmetic) -> Any:
    """The leading blocks of these rows that hold `end` positions, in whole units."""
    unit = lcm(shape.block_size, arithmetic.kv_unit)
    count = -(-end // unit) * unit // shape.block_size
    missing = count - columns.shape[1]
    if missing > 0:
        return np.pad(columns, ((0, 0), (0, missing)), constant_values=SCRAP_BLOCK)
    return columns[:, :count]


def _groups(
    columns: Any,  # [rows, blocks], int64
    positions: Any,  # [rows, width], int64: of the queries
    shape: CacheShape,
    arithmetic: Arithmetic,
) -> Iterator[tuple[slice, Any, int, int, Any]]:
    """The rows that read together, and their `blocks`, `length`, `seen` and `hidden`; see
    `RowGroup`."""
    ends = (positions[:, -1] + 1).tolist()
    for some in _runs(ends, shape, arithmetic, positions.shape[1]):
        blocks = _blocks(columns[some], max(ends[some]), shape, arithmetic)
        length = blocks.shape[1] * shape.block_size
        last = np.maximum(positions[some], 0)  # before the first position a query sees that one
        seen = int(last.min()) + 1
        beyond = np.arange(seen, length) > last[:, :, None]
        yield some, blocks, length, seen, np.where(beyond, np.float32(-np.inf), np.float32(0))


def _padded(array: Any, size: int) -> Any:  # [size]
    """The numbers in order, then zeros: position 0, and the scrap block."""
    padded = np.zeros(size, np.int64)
    padded[: array.size] = array.reshape(-1)
    return padded


def _runs(
    ends: Iterable[int], shape: CacheShape, arithmetic: Arithmetic, width: int
) -> Iterator[slice]:
    """Neighbouring rows that read together; row i reads `ends[i]` positions.

    A group ends where one more row would have the others read more positions than a group costs,
    or all of them would have more than SCORES_MOST scores, or GATHERED_MOST keys and values.
    """
    unit = arithmetic.kv_unit
    numbers = 2 * shape.kv_heads * shape.head_dim  # keys and values of a position
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
            yield slice(first, index)
            first, longest, wanted = index, reach, reach
        else:
            longest, wanted = both, wanted + reach
    yield slice(first, index + 1)
