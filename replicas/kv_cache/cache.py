"""One model's keys and values in fixed blocks. Knows nothing of tokens, sampling or batches.

Where a pass writes and reads is said by its layout (`device_layout` on a GPU, that of
`replicas.invariant` on a CPU).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replicas.kv_cache.shape import CacheShape


class PagedCache:
    """One model's KV tensors.

    Keys and values of a position lie side by side, so that a layer costs one write and one gather,
    and paged attention finds whole positions. For the attention of a CPU those of a block lie head
    by head, so that a gather copies whole runs of positions.

    What is stored is finite. Attention reads masked positions, too: padding in the scrap block,
    what an earlier sequence left in a block. Their weight is 0, but 0 times NaN is NaN, so one row
    beyond the range of numbers would spoil others. Only float16 has a range that activations may
    leave.
    """

    def __init__(
        self,
        shape: CacheShape,
        layers: int,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        by_head: bool = False,
    ) -> None:
        """`blocks` without the scrap block, which is added; `by_head` is the order for a CPU."""
        self.shape = shape
        self.blocks = blocks
        self.dtype = dtype
        self._overflows = dtype is torch.float16
        self._by_head = by_head
        block_size, kv_heads, head_dim = shape.block_size, shape.kv_heads, shape.head_dim
        sizes = (blocks + 1, block_size, 2, kv_heads, head_dim)
        if self._by_head:
            sizes = (blocks + 1, 2, kv_heads, block_size, head_dim)
        self._stores = [torch.zeros(sizes, dtype=dtype, device=device) for _ in range(layers)]
        self.layers = self._stores
        """Of each layer, whatever lies where: [blocks + 1, block_size, 2, kv_heads, head_dim]."""
        self._arrays: list[Any] = []
        """The same for numpy, which stores a few positions in a third of torch's time."""
        if self._by_head:
            self.layers = [store.permute(0, 3, 1, 2, 4) for store in self._stores]
            self._arrays = [_array(layer) for layer in self.layers]
        # One layer is read at a time: a standing buffer spares the page faults of fresh memory.
        self._gathered = self._stores[0].new_empty((0, block_size * head_dim))

    def write(self, layer: int, slots: Any, fresh: torch.Tensor) -> None:
        """Store keys and values, [tokens, 2, kv_heads, head_dim], where a layout says: by block and
        position in it where they lie by head, else by flat position. What is no number is made one,
        in place."""
        if self._overflows:
            fresh.nan_to_num_()
        if self._by_head:
            self._arrays[layer][slots] = _array(fresh)
        else:
            self._stores[layer].flatten(0, 1).index_copy_(0, slots, fresh)

    # ------------------------------------------------------------------ by head

    def runs(self, blocks: Any) -> torch.Tensor:  # [2 * kv_heads * blocks of all rows], int64
        """Where the keys and values of these blocks, [rows, blocks], lie: one run for a block and a
        head of either, in the order row, KV head, keys or values, block of the row."""
        per_block = 2 * self.shape.kv_heads
        heads = np.arange(per_block).reshape(2, self.shape.kv_heads).T
        runs = blocks[:, None, None, :] * per_block + heads[:, :, None]
        return torch.from_numpy(runs.reshape(-1))

    def room(self, runs: int) -> torch.Tensor:  # [runs, block_size * head_dim]
        """Of the standing buffer, for `gather`."""
        if self._gathered.shape[0] < runs:
            self._gathered = self._gathered.new_empty((runs, self._gathered.shape[1]))
        return self._gathered[:runs]

    def gather(
        self,
        layer: int,
        runs: torch.Tensor,  # [runs], int64
        out: torch.Tensor,  # [runs, block_size * head_dim]
    ) -> None:
        torch.index_select(self._stores[layer].view(-1, out.shape[1]), 0, runs, out=out)

    def clear(self) -> None:
        for layer in self.layers:
            layer.zero_()


def _array(x: torch.Tensor) -> Any:
    """The tensor's memory as numpy's array, which knows no bfloat16: its bits are as good."""
    return (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy()
