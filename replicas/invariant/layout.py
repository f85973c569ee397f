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
from replicas.kv_cache import SCRAP_BLOCK, CacheShape, LayerShape, TokenRange

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
    blocks: Any  # array [rows, blocks], int64: the blocks to read; by group where there are several
    length: int
    """KV positions read per row: those of all its blocks."""
    seen: int
    """Positions, from the first on, that every query sees."""
    hidden: Any  # array [rows, width, length - seen], float32
    """Of the others: 0, or -inf where a query does not see them."""
    last: Any  # array [rows, width], int64: the last position that each query sees

    def hidden_in(self, needs: LayerShape) -> tuple[int, Any]:
        """`seen` and `hidden` of a layer whose queries may see fewer positions than all before."""
        if needs.full:
            return self.seen, self.hidden
        positions, last = np.arange(self.length), self.last[:, :, None]
        seen = positions <= last
        if needs.window is not None:
            seen &= positions > last - needs.window
        if needs.chunk is not None:
            seen &= positions >= last - last % needs.chunk
        return 0, np.where(seen, np.float32(0), np.float32(-np.inf))


@dataclass(slots=True)
class PassLayout:
    """Where one forward pass reads and writes."""

    positions: torch.Tensor  # [padded tokens], int64, within the context
    slots: Any
    """Block to write and position in it, arrays [padded tokens], int64; such a pair by group where
    there are several."""
    groups: list[RowGroup]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The passes of one step: windows over the `width` positions that follow each row's start,
    which may be -1, before the first token."""

    table: torch.Tensor  # [rows, blocks] or [rows, groups, blocks], int64, on the host
    starts: Sequence[int]  # [rows]
    width: int
    shape: CacheShape
    arithmetic: Arithmetic

    @property
    def positions(self) -> torch.Tensor:  # [rows, width], int64
        return torch.tensor(self.starts)[:, None] + torch.arange(self.width)

    def window(self, begin: int, end: int) -> PassLayout:
        """The pass over positions start + begin .. start + end - 1 of each row, row by row."""
        ranges = [(start + begin, start + end) for start in self.starts]
        return ranges_layout(self.table, ranges, self.shape, self.arithmetic)


def ranges_layout(
    table: torch.Tensor,  # [rows, blocks] or [rows, groups, blocks], int64, on the host
    ranges: Sequence[TokenRange],  # of each row; none is empty
    shape: CacheShape,
    arithmetic: Arithmetic,
) -> PassLayout:
    """The pass over all tokens of the ranges, row by row; positions outside a row are written to
    the scrap block.

    Queries are read in tiles of at most TILE per row, each as far as it reaches.
    """
    columns = table.numpy()
    lengths = [end - begin for begin, end in ranges]
    padded = arithmetic.padded(sum(lengths))
    positions = np.concatenate([np.arange(begin, end) for begin, end in ranges])
    rows = np.repeat(np.arange(len(ranges)), lengths)
    slots = _slots(columns, rows, positions, shape, padded)
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
        for some in _runs(ends.tolist(), shape, arithmetic, width):
            queries = places[some, None] + np.arange(width)
            own = columns[of_rows[some]]
            groups.append(_group(queries, own, ends[some], shape, arithmetic))
    return PassLayout(
        positions=torch.from_numpy(_padded(positions.clip(0, shape.context_len - 1), padded)),
        slots=slots,
        groups=groups,
    )


def _slots(columns: Any, rows: Any, positions: Any, shape: CacheShape, padded: int) -> Any:
    """Block and place in it of each position of a row, by group where there are several; the scrap
    block where it has none."""
    column, offset = np.divmod(positions, shape.block_size)
    last = columns.shape[-1] - 1
    outside = (column < 0) | (column > last)
    column, offset = column.clip(0, last), _padded(offset, padded)

    def own(table: Any) -> tuple[Any, Any]:
        return _padded(np.where(outside, SCRAP_BLOCK, table[rows, column]), padded), offset

    if columns.ndim == 2:
        return own(columns)
    return [own(columns[:, group]) for group in range(columns.shape[1])]


def _group(
    queries: Any,  # array [rows, width], int64
    columns: Any,  # array [rows, blocks] or [rows, groups, blocks], int64
    ends: Any,  # array [rows], int64: one more than the last query's position
    shape: CacheShape,
    arithmetic: Arithmetic,
) -> RowGroup:
    """Reads the leading blocks up to the last end, in whole units."""
    unit = lcm(shape.block_size, arithmetic.kv_unit)
    count = -(-max(ends.max(), 1) // unit) * unit // shape.block_size
    blocks = columns[..., :count]
    if missing := count - blocks.shape[-1]:
        room = [(0, 0)] * (blocks.ndim - 1) + [(0, missing)]
        blocks = np.pad(blocks, room, constant_values=SCRAP_BLOCK)
    if blocks.ndim == 3:
        blocks = [blocks[:, group] for group in range(blocks.shape[1])]
    length = count * shape.block_size
    # Before the first position a query sees that one.
    last = np.maximum(ends[:, None] + np.arange(-queries.shape[1], 0), 0)
    seen = int(last.min()) + 1
    beyond = np.arange(seen, length) > last[:, :, None]
    hidden = np.where(beyond, np.float32(-np.inf), np.float32(0))
    return RowGroup(queries, blocks, length, seen, hidden, last)


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
