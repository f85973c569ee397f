"""Where a pass on a device reads and writes: index arithmetic in tensors, and nothing is read back.

A pass is a grid of rows and positions, row by row. What shapes depend on is known on the host, all
else is worked out on the device when it is asked for; so a pass can be recorded, and one that is
replayed instead costs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from replicas.kv_cache.shape import SCRAP_BLOCK, CacheShape, TokenRange
from replicas.transfers import upload


class DevicePassLayout:
    """One pass: `width` positions of each row from its start on, or some cells of that grid.

    A cell is row * width + column. Positions outside a row (before 0, or beyond its blocks) are
    written to the scrap block.
    """

    def __init__(
        self,
        table: torch.Tensor,  # [rows, blocks] or [rows, groups, blocks], int64
        starts: torch.Tensor,  # [rows], int64
        width: int,
        reach: int,
        shape: CacheShape,
        cells: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> None:
        """`reach`: KV positions that every row reads, known on the host; `cells`, [tokens], int64:
        the tokens of the pass, of all cells if None, and `lengths`, [rows], int64, how many of them
        each row has."""
        self.table = table
        self.starts = starts
        self.width = width
        self.reach = reach
        self.shape = shape
        self.cells = cells
        self._lengths = lengths
        self.rows = table.shape[0]

    @property
    def tokens(self) -> int:
        return self.rows * self.width if self.cells is None else self.cells.shape[0]

    @property
    def padded(self) -> int:
        """Tokens that the pass computes."""
        tile = self.shape.tile
        return -(-self.tokens // tile) * tile

    @cached_property
    def grid(self) -> torch.Tensor:  # [rows, width], int64
        """The position of every cell, which may lie outside its row."""
        return self.starts[:, None] + torch.arange(self.width, device=self.table.device)

    @cached_property
    def runs(self) -> tuple[torch.Tensor, torch.Tensor]:  # [rows], int64, each
        """The place of each row's first token among those of the pass, and how many it has."""
        if self._lengths is not None:
            return self._lengths.cumsum(0) - self._lengths, self._lengths
        counts = torch.full_like(self.starts, self.width)
        return torch.arange(self.rows, device=counts.device) * self.width, counts

    @cached_property
    def positions(self) -> torch.Tensor:  # [padded tokens], int64
        return self._of_all(self.grid.clamp(0, self.shape.context_len - 1))

    @cached_property
    def tables(self) -> torch.Tensor | Sequence[torch.Tensor]:  # each [rows, blocks], int64
        """By group, where there are several."""
        return self.table.unbind(1) if self.table.dim() == 3 else self.table

    @cached_property
    def slots(self) -> torch.Tensor | list[torch.Tensor]:  # each [padded tokens], int64
        """By group, where there are several."""
        tables = self.tables
        if isinstance(tables, torch.Tensor):
            return self._slots(tables)
        return [self._slots(table) for table in tables]

    def _slots(self, table: torch.Tensor) -> torch.Tensor:
        size, columns = self.shape.block_size, table.shape[1]
        column = torch.div(self.grid, size, rounding_mode="floor")
        block = table.gather(1, column.clamp(0, columns - 1))
        block = block.masked_fill((column < 0) | (column >= columns), SCRAP_BLOCK)
        return self._of_all(block * size + self.grid % size)

    def _of_all(self, grid: torch.Tensor) -> torch.Tensor:
        """Padding is 0: the first position, and the scrap block."""
        flat = grid.flatten(0, 1)
        if self.cells is not None:
            flat = flat.index_select(0, self.cells)
        more = self.padded - self.tokens
        return torch.cat((flat, flat.new_zeros((more, *flat.shape[1:])))) if more else flat


class DeviceStepLayout:
    """The passes of one step; see `replicas.invariant`'s StepLayout."""

    def __init__(
        self,
        table: torch.Tensor,  # [rows, blocks] or [rows, groups, blocks], int64
        starts: Sequence[int] | torch.Tensor,  # [rows]
        width: int,
        shape: CacheShape,
        reach: int | None = None,
    ) -> None:
        """`reach` is needed with starts on the device: KV positions that rows read at most."""
        if isinstance(starts, torch.Tensor):
            assert reach is not None, "starts on a device come with their reach"
            self._starts, self._reach = starts, reach
        else:
            self._starts = upload(starts, torch.int64, table.device)
            self._reach = reach or max(starts) + width
        self._table = table
        self._shape = shape
        self._width = width

    @property
    def positions(self) -> torch.Tensor:  # [rows, width], int64
        return self._starts[:, None] + torch.arange(self._width, device=self._table.device)

    def window(self, begin: int, end: int) -> DevicePassLayout:
        starts = self._starts + begin if begin else self._starts
        return DevicePassLayout(self._table, starts, end - begin, self._reach, self._shape)


def device_ranges(
    table: torch.Tensor,  # [rows, blocks] or [rows, groups, blocks], int64
    ranges: Sequence[TokenRange],
    shape: CacheShape,
) -> DevicePassLayout:
    """The pass over all tokens of the ranges, row by row, as cells of a grid."""
    width = max(end - begin for begin, end in ranges)
    cells = [
        row * width + column
        for row, (begin, end) in enumerate(ranges)
        for column in range(end - begin)
    ]
    starts = [begin for begin, _ in ranges]
    reach = max(starts) + width
    ragged = len(cells) < len(ranges) * width
    return DevicePassLayout(
        table,
        upload(starts, torch.int64, table.device),
        width,
        reach,
        shape,
        upload(cells, torch.int64, table.device) if ragged else None,
        upload([end - begin for begin, end in ranges], torch.int64, table.device),
    )
