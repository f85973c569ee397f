"""The paged KV cache: fixed blocks, a block table per sequence, one length per row.

What a forward pass writes and reads of it is said by a window (`replicas.windows`). This is the
only file that meets transformers' cache interface. Knows nothing of tokens, sampling or batches.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from replicas.upload import send
from replicas.windows import SCRAP_BLOCK, Part, Window

PART_NUMBERS = 6144
"""Numbers (keys and values of one layer) whose reading takes about as long as reading in one more
part: a few calls of some microseconds each."""
PART_SETUP_NUMBERS = 28672
"""The same of what a part takes once a pass, which all layers share."""


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
        table = self._tables.get(sequence_id)
        if table is None:
            table = self._tables[sequence_id] = array("q")
        elif len(table) * self.block_size >= length:
            return
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
        self._kv_heads = kv_heads
        numbers = PART_NUMBERS + PART_SETUP_NUMBERS // layers
        self.part_positions = max(1, numbers // (2 * kv_heads * head_dim))
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
            blocks = max([part.blocks.shape[0] for part in window.parts or (window,)])
            wanted = blocks * 2 * self._kv_heads
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
        if self._on_host:
            runs = self._runs.get(id(part))
            if runs is None:
                runs = self._runs[id(part)] = self.runs(part)
            out = self.room(runs.shape[0])
            self.gather(layer_idx, runs, out)
            shape = (part.rows, self._kv_heads, 2, -1, self._shape[-1])
            both = out.view(shape)[:, :, :, : part.length].permute(2, 0, 1, 3, 4)
        else:
            read = self._stores[layer_idx].index_select(0, part.blocks)
            read = read.view(part.rows, -1, *self._shape[1:])[:, : part.length]
            both = read.permute(2, 0, 3, 1, 4)
        keys, values = both.unbind(0)
        return keys, values

    def runs(self, part: Part) -> torch.Tensor:  # [2 * kv_heads * blocks of the part], int64
        """Where on a host the part's keys and values lie, one run for a block and head of either:
        in the order row, KV head, keys or values, block of the row."""
        per_block = 2 * self._kv_heads
        blocks = part.blocks.numpy().reshape(part.rows, 1, 1, -1)
        heads = np.arange(per_block).reshape(2, self._kv_heads).T
        return torch.from_numpy((blocks * per_block + heads[:, :, None]).reshape(-1))

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
