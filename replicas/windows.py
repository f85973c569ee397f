"""Where a forward pass reads and writes: positions, slots, masks and blocks from lengths alone.

Rows are left-aligned and every forward pass writes row i at its own positions, so realignment
after a step is arithmetic on lengths: no KV data moves. Masks and positions come from lengths,
never from token values.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from replicas.upload import upload

_NUMPY_HAS = (torch.float32, torch.float16)
"""Dtypes of masks that numpy has, too."""
SCRAP_BLOCK = 0
"""A block nobody owns: padding of ragged rows is written there and never attended to."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What index arithmetic must know of a replica's cache."""

    block_size: int
    context_len: int
    """Positions in use are below it; padding is clamped to it."""
    dtype: torch.dtype


@dataclass(slots=True)
class Part:
    """What some rows of a forward pass read: as far as the longest of them.

    Made a dozen times a step and changed by nobody: freezing it would triple what that takes.
    """

    blocks: torch.Tensor  # [rows * blocks of the longest], int64: blocks to read
    length: int
    """KV positions read per row: those before the window and the window itself."""
    mask: torch.Tensor | None  # [rows or 1, 1, width, length], 0 or -inf; None: nothing is masked
    rows: int
    width: int
    first: bool = field(default=False, kw_only=True)
    """Nothing lies before any row, so what they read are their own tokens' keys and values: a query
    sees those up to its own. There are no blocks and no mask then."""

    def folded_mask(self, group: int) -> torch.Tensor | None:  # [.., 1, group * width, length]
        """The mask where `group` query heads that share a KV head are rows of one."""
        if self.mask is None or group == 1 or self.width == 1:
            return self.mask
        masks, _, width, length = self.mask.shape
        shape = (masks, 1, group * width, length)
        return self.mask.expand(masks, group, width, length).reshape(shape)


@dataclass(slots=True)
class Window(Part):
    """Where one forward pass of a group reads and writes: made by `Layout`."""

    positions: torch.Tensor  # [rows, width], int64, within the context
    begins: Any  # [rows], int64, array or tensor: what `starts` is made of
    slots: torch.Tensor  # [rows * width], int64: flat KV positions to write
    parts: tuple[Part, ...] = ()
    """The same rows in several parts, in order, for a model that reads so; empty: all as one. With
    parts, blocks and masks are theirs alone. Parts of one width each may make up a window that has
    none: see `replicas.spans`."""
    cells: torch.Tensor | None = None  # [tokens], int64; None: every cell of the grid, in order
    """Of a packed window, which holds some cells of the grid of rows and positions only: the cell
    row * width + column of each token. Its positions are [1, tokens] and its slots [tokens]."""

    @property
    def starts(self) -> torch.Tensor:  # [rows], int64
        """Positions of the first column, which may lie outside the context. Only who reads in place
        asks for them."""
        begins = self.begins
        return begins if isinstance(begins, torch.Tensor) else torch.from_numpy(begins)

    def packed(self, cells: torch.Tensor) -> Window:
        """The window of some of the cells only, in the order given, [tokens]."""
        return Window(
            positions=self.positions.reshape(-1).index_select(0, cells)[None],
            begins=self.begins,
            slots=self.slots.index_select(0, cells),
            blocks=self.blocks,
            length=self.length,
            mask=self.mask,
            rows=self.rows,
            width=self.width,
            parts=self.parts,
            cells=cells,
        )

    def unpack(self, x: torch.Tensor) -> torch.Tensor:  # [rows * width, ...]
        """Put what the tokens have, [tokens, ...], into the grid; cells without a token are 0."""
        if self.cells is None:
            return x
        return x.new_zeros((self.rows * self.width, *x.shape[1:])).index_copy_(0, self.cells, x)

    def pack(self, grid: torch.Tensor) -> torch.Tensor:  # [tokens, ...]
        """Take what the tokens have out of the grid, [rows * width, ...]."""
        return grid if self.cells is None else grid.index_select(0, self.cells)


@dataclass(slots=True)
class Span:
    """What is known on the host of where a step's rows lie; it fixes shapes and spares masks."""

    longest: int
    """The greatest start of a row, or a bound of it."""
    uniform: bool
    """All rows start at one position."""
    inside: bool
    """Every position of every row has a column in the block table."""
    shortest: int = 0
    """The least start of a row, or a bound of it: positions before it are seen by every query."""

    @classmethod
    def of(cls, starts: Sequence[int], width: int, table: torch.Tensor, shape: CacheShape) -> Span:
        """Of rows that start at `starts` and have `width` positions each."""
        first, longest = min(starts), max(starts)
        inside = first >= 0 and (longest + width - 1) // shape.block_size < table.shape[1]
        return cls(longest, first == longest, inside, max(first, 0))


@lru_cache(maxsize=32)
def _masks(reach: int, dtype: torch.dtype) -> Any:  # array, [reach, reach + 1]
    """Every row that a mask of up to `reach` positions may have: row i hides all of them but the
    first reach - i.

    They overlap in memory, 2 * reach numbers in all.
    """
    stair = torch.zeros(2 * reach, dtype=dtype)
    stair[reach:] = -torch.inf
    return stair.as_strided((reach, reach + 1), (1, 1)).numpy()


@cache
def _no_blocks(device: torch.device) -> torch.Tensor:
    return torch.zeros(0, dtype=torch.int64, device=device)


FEW = 256
"""Positions of a step, up to which the host works out one after the other."""

Bounds = tuple[int, int, int]
"""First row, the row after the last, and the greatest start of a part."""


def _few(
    columns: Any,  # array, [rows, blocks]
    starts: Sequence[int],
    width: int,
    block_size: int,
) -> Any:  # array, [2, rows, width]: positions, and slots
    """Of so few rows that one number after the other takes less time than any operation on all: a
    pass before has emptied the caches, and each operation's code has to be fetched anew."""
    numbers = array("q")
    for start in starts:
        numbers.extend(range(start, start + width))
    block_of = columns.item
    for row, start in enumerate(starts):
        column, offset = divmod(start, block_size)
        missing = width
        while missing > 0:
            slot = block_of(row, column) * block_size + offset
            here = min(block_size - offset, missing)
            numbers.extend(range(slot, slot + here))
            missing -= here
            column, offset = column + 1, 0
    return np.frombuffer(numbers, np.int64).reshape(2, len(starts), width)


class Layout:
    """Index arithmetic for all forward passes of one step, computed at once.

    `starts[i]` is the first position of row i in the step; windows are slices of the `width`
    positions that follow. With equal starts the group is uniform: one mask serves all rows, and a
    window of width 1 needs none. Positions outside a row (before 0, or padding beyond its blocks)
    are written to the scrap block.
    """

    def __init__(
        self,
        table: torch.Tensor,  # [rows, blocks], int64
        starts: Sequence[int] | torch.Tensor,  # [rows]
        width: int,
        shape: CacheShape,
        span: Span | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        """A span is needed with starts that are a tensor already, so that none is read back.

        `parts` are the rows of each part that windows are read in, in order; see `replicas.parts`.
        """
        self._on_host = table.device.type == "cpu" and not isinstance(starts, torch.Tensor)
        if isinstance(starts, torch.Tensor):
            assert span is not None, "starts on a device come with their span"
            self._starts = None
        else:
            span = span or Span.of(starts, width, table, shape)
            self._starts = starts
        self._table = table
        self._columns: Any = table.numpy() if self._on_host else table
        self._no_blocks = _no_blocks(table.device)
        self._block_size = block_size = shape.block_size
        self._longest = span.longest
        self.uniform = span.uniform
        self._positions: Any  # [rows, width]
        self._slots: Any  # [rows, width]
        if self._on_host and self._starts and span.inside and len(self._starts) * width <= FEW:
            self._positions, self._slots = _few(self._columns, self._starts, width, block_size)
        else:
            self._place(starts, width, span.inside)
        self._inside = self._positions
        if not span.inside or span.longest + width > shape.context_len:
            self._inside = self._positions.clip(0, shape.context_len - 1)
        self._read: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        """Blocks per row and which, by rows: the windows of a step mostly read the same ones."""
        self._parts = self._bounds(parts)
        self._mask = self._masked(starts, width, span, shape.dtype)

    def _place(self, starts: Sequence[int] | torch.Tensor, width: int, inside: bool) -> None:
        """Positions and slots by operations on all at once."""
        # numpy's operations on small arrays take a tenth of the time of torch's.
        xp: Any = np if self._on_host else torch
        rows, reach = self._table.shape
        if self._on_host:
            first: Any = np.array(starts, dtype=np.int64)
        elif isinstance(starts, torch.Tensor):
            first = starts
        else:
            first = upload(starts, torch.int64, self._table.device)
        self._positions = first[:, None] + self._arange(0, width)
        column = self._positions // self._block_size
        every = self._arange(0, rows)[:, None]
        if inside:
            block = self._columns[every, column]
        else:
            outside = (column < 0) | (column >= reach)
            block = xp.where(outside, SCRAP_BLOCK, self._columns[every, column.clip(0, reach - 1)])
        self._slots = block * self._block_size + self._positions % self._block_size

    def _masked(
        self, starts: Sequence[int] | torch.Tensor, width: int, span: Span, dtype: torch.dtype
    ) -> Any:  # [rows or 1, 1, width, longest + width], array or tensor
        """What a query does not see is -inf."""
        length = span.longest + width
        size = (1 if span.uniform else self._table.shape[0], 1, width, length)
        if self._on_host and span.inside and dtype in _NUMPY_HAS:
            # A row's queries see one position more each: neighbours among all masks' rows.
            masks = _masks(1 << length.bit_length(), dtype)
            mask = np.empty(size, masks.dtype)
            for row, seen in enumerate(starts[: size[0]]):
                begin = masks.shape[0] - 1 - seen
                mask[row, 0] = masks[begin : begin - width : -1, :length]
            return mask
        last_seen = self._positions[: size[0]]
        if not span.inside:
            # Every query sees a key, so that padding stays finite.
            last_seen = last_seen.clip(0)
        # All see what lies before the shortest row's first query; nothing is computed for it.
        ragged = min(span.shortest + 1, length)
        hidden = self._tensor(self._arange(ragged, length) > last_seen[:, :, None])
        zeros = torch.zeros(size, dtype=dtype, device=self._table.device)
        zeros[..., ragged:].masked_fill_(hidden[:, None], -torch.inf)
        return zeros

    def _arange(self, begin: int, end: int) -> Any:
        if self._on_host:
            return np.arange(begin, end)
        return torch.arange(begin, end, device=self._table.device)

    @property
    def positions(self) -> torch.Tensor:  # [rows, width], int64
        return self._tensor(self._positions)

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array) if isinstance(array, np.ndarray) else array

    def window(self, begin: int, end: int) -> Window:
        """The pass over positions starts + begin .. starts + end - 1, in the layout's parts."""
        return self._window(begin, end, end, self._parts)

    def draft_windows(self, k: int, parts: Sequence[int] = ()) -> list[Window]:
        """The passes of k draft steps: over two positions, then over one more each; in these parts.

        Where rows are masked anyway, all passes read as far as the last one does: the same blocks.
        """
        bounds = self._bounds(parts)
        return [
            self._window(j + 1 if j else 0, j + 2, j + 2 if self.uniform else k + 1, bounds)
            for j in range(k)
        ]

    def _window(self, begin: int, end: int, reach: int, bounds: Sequence[Bounds]) -> Window:
        """A pass that reads up to position starts + reach - 1, starts being the greatest of those
        that read together."""
        rows, width = self._table.shape[0], end - begin
        length = self._longest + reach
        unmasked = (self.uniform and width == 1) or bounds
        return Window(
            positions=self._tensor(self._inside[:, begin:end]),
            begins=self._positions[:, begin],
            slots=self._tensor(self._slots[:, begin:end].reshape(-1)),
            blocks=self._no_blocks if bounds else self._blocks(0, rows, length),
            length=length,
            mask=None if unmasked else self._tensor(self._mask[:, :, begin:end, :length]),
            rows=rows,
            width=width,
            parts=tuple(
                [
                    Part(
                        blocks=self._blocks(first, after, longest + reach),
                        length=longest + reach,
                        mask=self._tensor(self._mask[first:after, :, begin:end, : longest + reach]),
                        rows=after - first,
                        width=width,
                    )
                    for first, after, longest in bounds
                ]
            ),
        )

    def _bounds(self, parts: Sequence[int]) -> list[Bounds]:
        """None where all rows begin alike: they read equally far, and share one mask."""
        if self.uniform:
            return []
        bounds, first = [], 0
        for rows in parts:
            assert self._starts is not None, "parts are of starts on the host"
            after = first + rows
            bounds.append((first, after, max(self._starts[first:after])))
            first = after
        assert first in (0, self._table.shape[0]), "parts hold all rows"
        return bounds

    def _blocks(self, first: int, after: int, length: int) -> torch.Tensor:
        """Blocks of these rows' first positions, [rows * blocks of a row]."""
        blocks = -(-length // self._block_size)
        known = self._read.get((first, after))
        if known is not None and known[0] == blocks:
            return known[1]
        table = self._columns[first:after, :blocks]
        missing = blocks - table.shape[1]
        if missing > 0:
            table = (
                np.pad(table, ((0, 0), (0, missing)), constant_values=SCRAP_BLOCK)
                if self._on_host
                else torch.nn.functional.pad(table, (0, missing), value=SCRAP_BLOCK)
            )
        read = self._tensor(table.reshape(-1))
        self._read[first, after] = (blocks, read)
        return read
