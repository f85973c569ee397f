"""The paged KV cache: fixed blocks, a block table per sequence, one length per row.

Rows are left-aligned and every forward pass writes row i at its own positions, so realignment
after a step is arithmetic on lengths: no KV data moves. Masks and positions come from lengths,
never from token values. This is the only file that meets transformers' cache interface.

Knows nothing of tokens, sampling or orders.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from replicas.upload import send, upload

_NUMPY_HAS = (torch.float32, torch.float16)
"""Dtypes of masks that numpy has, too."""
SCRAP_BLOCK = 0
"""A block nobody owns: padding of ragged rows is written there and never attended to."""

PART_NUMBERS = 8192
"""Numbers (keys and values of one layer) whose reading takes about as long as reading in one more
part: a few calls of some microseconds each."""


class OutOfBlocks(Exception):
    """More KV blocks were asked for than are free; the pool's reservation prevents it."""


class BlockAllocator:
    """Which blocks belong to which sequence. One table serves target and draft alike."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = blocks
        # The scrap block is extra; the last freed block is handed out first (it is warm).
        self._free = list(range(blocks, SCRAP_BLOCK, -1))
        self._tables: dict[str, array[int]] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, length: int) -> int:
        """Blocks that hold `length` KV positions."""
        return -(-length // self.block_size)

    def grow(self, sequence_id: str, length: int) -> None:
        """Own blocks for `length` positions; raises OutOfBlocks and then changes nothing."""
        table = self._tables.setdefault(sequence_id, array("q"))
        missing = self.blocks_for(length) - len(table)
        if missing > self.free_blocks:
            if not table:
                del self._tables[sequence_id]
            raise OutOfBlocks(f"{missing} KV blocks wanted, {self.free_blocks} are free")
        for _ in range(missing):
            table.append(self._take())

    def _take(self) -> int:
        """A free block for one owner; there is one."""
        return self._free.pop()

    def release(self, sequence_id: str) -> None:
        """Free all blocks of the sequence; unknown ids are ignored."""
        self._free.extend(reversed(self._tables.pop(sequence_id, array("q"))))

    def table(self, sequence_ids: Sequence[str], device: torch.device) -> torch.Tensor:
        """Block tables of the rows, [rows, blocks of the longest], padded with the scrap block."""
        tables = [self._tables[sequence_id] for sequence_id in sequence_ids]
        width = max(map(len, tables))
        flat = array("q")
        for table in tables:
            flat += table
            flat += array("q", [SCRAP_BLOCK]) * (width - len(table))
        # A view of `flat`, which lives as long as the tensor.
        padded = np.frombuffer(flat, np.int64).reshape(len(tables), width)
        return send(torch.from_numpy(padded), device)

    def check_integrity(self) -> None:
        """Every block is free or owned exactly once."""
        owned = [block for table in self._tables.values() for block in table]
        everything = sorted(owned + self._free)
        assert everything == list(range(1, self.blocks + 1)), "a KV block is lost or shared"


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
    """The same rows in several parts, in order, for whoever reads them so; empty: all as one. Parts
    of one width each may make up a window that has none: see `replicas.spans`."""
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


@dataclass(frozen=True, slots=True)
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
        # numpy's operations on small arrays take a tenth of the time of torch's.
        xp: Any = np if self._on_host else torch
        columns: Any = table
        if isinstance(starts, torch.Tensor):
            assert span is not None, "starts on a device come with their span"
            first: Any = starts
        else:
            span = span or Span.of(starts, width, table, shape)
            if self._on_host:
                columns, first = table.numpy(), np.array(starts, dtype=np.int64)
            else:
                first = upload(starts, torch.int64, table.device)

        def arange(begin: int, end: int) -> Any:
            if self._on_host:
                return np.arange(begin, end)
            return torch.arange(begin, end, device=table.device)

        self._table = table
        self._block_size = block_size = shape.block_size
        self._longest = span.longest
        self.uniform = span.uniform
        self._positions = first[:, None] + arange(0, width)  # [rows, width]
        self._inside = self._positions
        column = self._positions // block_size
        every = arange(0, table.shape[0])[:, None]
        if span.inside:
            block = columns[every, column]
        else:
            reach = table.shape[1]
            outside = (column < 0) | (column >= reach)
            block = xp.where(outside, SCRAP_BLOCK, columns[every, column.clip(0, reach - 1)])
        if not span.inside or span.longest + width > shape.context_len:
            self._inside = self._positions.clip(0, shape.context_len - 1)
        self._slots = block * block_size + self._positions % block_size
        self._read: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        """Blocks per row and which, by rows: the windows of a step mostly read the same ones."""
        self._parts: list[tuple[int, int, int]] = []
        """First row, the row after the last, and the greatest start of each part."""
        end = 0
        for rows in parts:
            assert not isinstance(starts, torch.Tensor), "parts are of starts on the host"
            self._parts.append((end, end + rows, max(starts[end : end + rows])))
            end += rows
        assert end in (0, table.shape[0]), "parts hold all rows"
        length = self._longest + width
        # Every query sees a key, so that padding stays finite.
        last_seen = self._positions[:1] if self.uniform else self._positions
        if not span.inside:
            last_seen = last_seen.clip(0)
        size = (last_seen.shape[0], 1, width, length)
        # The memory is torch's, so that what is measured of it is all.
        self._mask: Any = torch.empty(size, dtype=shape.dtype, device=table.device)
        if self._on_host and shape.dtype in _NUMPY_HAS:
            self._mask = self._mask.numpy()
            if span.inside:
                # A row's queries see one position more each: neighbours among all masks' rows.
                masks = _masks(1 << length.bit_length(), shape.dtype)
                for row, seen in enumerate(last_seen[:, 0].tolist()):
                    begin = masks.shape[0] - 1 - seen
                    self._mask[row, 0] = masks[begin : begin - width : -1, :length]
                return
        # All see what lies before the shortest row's first query; nothing is computed for it.
        ragged = min(span.shortest + 1, length)
        hidden = self._tensor(arange(ragged, length) > last_seen[:, :, None])
        mask = self._tensor(self._mask).zero_()
        mask[..., ragged:].masked_fill_(hidden[:, None], -torch.inf)

    @property
    def positions(self) -> torch.Tensor:  # [rows, width], int64
        return self._tensor(self._positions)

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array) if isinstance(array, np.ndarray) else array

    def window(self, begin: int, end: int) -> Window:
        """The pass over positions starts + begin .. starts + end - 1."""
        length = self._longest + end
        unmasked = self.uniform and end - begin == 1
        rows = self._table.shape[0]
        return Window(
            positions=self._tensor(self._inside[:, begin:end]),
            begins=self._positions[:, begin],
            slots=self._tensor(self._slots[:, begin:end].reshape(-1)),
            blocks=self._blocks(0, rows, length),
            length=length,
            mask=None if unmasked else self._tensor(self._mask[:, :, begin:end, :length]),
            rows=rows,
            width=end - begin,
            parts=tuple(
                [
                    Part(
                        blocks=self._blocks(first, after, longest + end),
                        length=longest + end,
                        mask=self._tensor(self._mask[first:after, :, begin:end, : longest + end]),
                        rows=after - first,
                        width=end - begin,
                    )
                    for first, after, longest in self._parts
                ]
            ),
        )

    def _blocks(self, first: int, after: int, length: int) -> torch.Tensor:
        """Blocks of these rows' first positions, [rows * blocks of a row]."""
        blocks = -(-length // self._block_size)
        known = self._read.get((first, after))
        if known is not None and known[0] == blocks:
            return known[1]
        table = self._table[first:after, :blocks]
        missing = blocks - table.shape[1]
        if missing > 0:
            table = torch.nn.functional.pad(table, (0, missing), value=SCRAP_BLOCK)
        read = table.reshape(-1)
        self._read[first, after] = (blocks, read)
        return read


class PagedCache:
    """One model's KV tensors, handed to transformers as its `past_key_values`.

    On a GPU keys and values of a position lie side by side, so that a layer costs one write and one
    gather, and who reads in place finds whole positions. On a CPU those of a block lie head by
    head, so that a gather copies whole runs of positions: of pieces as short as one position's head
    it has to find a page each, which takes longer than the copy.

    What is stored is finite. Rows read masked positions, too: padding in the scrap block, what an
    earlier owner left in a block. Their weight is 0, but 0 times NaN is NaN, so one row beyond the
    range of numbers would spoil others. Only float16 has a range that activations may leave.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._overflows = dtype is torch.float16
        self._shape = (block_size, 2, kv_heads, head_dim)
        self.part_positions = max(1, PART_NUMBERS // (2 * kv_heads * head_dim))
        """KV positions whose reading takes about as long as reading in one more part."""
        self._on_host = device.type == "cpu"
        shape = (blocks + 1, *self._shape)
        if self._on_host:
            shape = (blocks + 1, 2, kv_heads, block_size, head_dim)
        self._stores = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        # Whatever lies where: [blocks + 1, block_size, 2, kv_heads, head_dim].
        self._layers = self._stores
        self._arrays: list[Any] = []
        """The same for numpy, which stores a few positions in a third of torch's time."""
        if self._on_host:
            self._layers = [store.permute(0, 3, 1, 2, 4) for store in self._stores]
            self._arrays = [_array(layer) for layer in self._layers]
        self._window: Window | None = None
        self._in_place = False
        self._at: tuple[Any, Any] = ((), ())
        """Block and position in it of each of the window's tokens."""
        # One layer is read at a time: a standing buffer spares the page faults of fresh memory. A
        # GPU has none, and a recorded pass must not read from a buffer that others replace.
        self._gathered = self._stores[0].new_empty((0, block_size * head_dim))
        self._runs: dict[int, torch.Tensor] = {}
        """`runs` of parts of the window, by the part's id."""

    def enter(self, window: Window, in_place: bool = False) -> None:
        """Set where the next forward pass reads and writes, and whether its reads gather."""
        self._window = window
        self._in_place = in_place
        if not self._on_host:
            return
        self._at = np.divmod(window.slots.numpy(), self.block_size)
        self._runs.clear()
        if not in_place:
            _, _, kv_heads, _ = self._shape
            wanted = max(part.blocks.shape[0] for part in (window, *window.parts)) * 2 * kv_heads
            if self._gathered.shape[0] < wanted:
                self._gathered = self._gathered.new_empty((wanted, self._gathered.shape[1]))

    def update(
        self,
        key_states: torch.Tensor,  # [rows, kv_heads, width, head_dim]
        value_states: torch.Tensor,  # [rows, kv_heads, width, head_dim]
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new positions, return what `read` returns (transformers' interface)."""
        both = torch.stack((key_states, value_states), dim=1)  # [rows, 2, heads, width, dim]
        self.write(layer_idx, both.permute(0, 3, 1, 2, 4).reshape(-1, *self._shape[1:]))
        return self.read(layer_idx)

    def write(self, layer_idx: int, fresh: torch.Tensor) -> None:
        """Store keys and values of the window's tokens, [tokens, 2, kv_heads, head_dim]; those that
        are no numbers become some, in place."""
        assert self._window is not None, "enter() comes before a forward pass"
        if self._overflows:
            fresh.nan_to_num_()
        if self._on_host:
            self._arrays[layer_idx][self._at] = _array(fresh)
        else:
            self._stores[layer_idx].flatten(0, 1).index_copy_(0, self._window.slots, fresh)

    def read(self, layer_idx: int, part: Part | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all positions that the rows read, [rows, kv_heads, length, head_dim];
        of a part of the window, or of all its rows.

        They stay valid until the next time. In place it is the layer's whole cache, each
        [blocks + 1, block_size, kv_heads, head_dim], and nothing is copied.
        """
        part = part or self._window
        assert part is not None, "enter() comes before a forward pass"
        if self._in_place:
            keys, values = self._layers[layer_idx].unbind(2)
            return keys, values
        _, _, kv_heads, dim = self._shape
        if self._on_host:
            runs = self._runs.get(id(part))
            if runs is None:
                runs = self._runs[id(part)] = torch.from_numpy(self.runs(part))
            out = self.room(runs.shape[0])
            self.gather(layer_idx, runs, out)
            both = out.view(2, part.rows, kv_heads, -1, dim)[:, :, :, : part.length]
        else:
            read = self._stores[layer_idx].index_select(0, part.blocks)
            read = read.view(part.rows, -1, *self._shape[1:])[:, : part.length]
            both = read.permute(2, 0, 3, 1, 4)
        keys, values = both.unbind(0)
        return keys, values

    def runs(self, part: Part) -> Any:  # array, [2 * kv_heads * blocks of the part], int64
        """Where on a host the part's keys and values lie, one run for a block and head of either:
        in the order keys or values, row, KV head, block of the row."""
        _, _, kv_heads, _ = self._shape
        blocks = part.blocks.numpy().reshape(1, part.rows, 1, -1)
        heads = np.arange(2 * kv_heads).reshape(2, 1, kv_heads, 1)
        return (blocks * (2 * kv_heads) + heads).reshape(-1)

    def room(self, runs: int) -> torch.Tensor:  # [runs, block_size * head_dim]
        """Of a host's standing buffer, for `gather`; it serves until the next pass is entered."""
        return self._gathered[:runs]

    def gather(
        self,
        layer_idx: int,
        runs: torch.Tensor,  # [runs], int64
        out: torch.Tensor,  # [runs, block_size * head_dim]
    ) -> None:
        """Copy keys and values on a host, run by run."""
        torch.index_select(self._stores[layer_idx].view(-1, out.shape[1]), 0, runs, out=out)

    def clear(self) -> None:
        """Store 0 everywhere."""
        for layer in self._layers:
            layer.zero_()

    @property
    def bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self._layers)


def _array(x: torch.Tensor) -> Any:
    """The tensor's memory as numpy's array, which knows no bfloat16: its bits are as good."""
    return (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy()


def kv_bytes_per_block(
    layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one block over all layers of a model."""
    return layers * block_size * 2 * kv_heads * head_dim * dtype.itemsize
