"""One model's keys and values in fixed blocks. Knows nothing of tokens, sampling or batches.

Where a pass writes and reads is said by its layout (`device_layout` on a GPU, that of
`replicas.invariant` on a CPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from replicas.kv_cache.groups import BlockGroups, one_group
from replicas.kv_cache.shape import CacheShape, LayerShape, stores, uniform

_T = TypeVar("_T")


class PagedCache:
    """One model's KV tensors.

    Layers of different groups lie in the same tensors, in other blocks of them: what a layout says
    of blocks comes by group where there are several, and `own` takes a layer's.

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
        layers: int | Sequence[LayerShape],
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        by_head: bool = False,
        groups: BlockGroups | None = None,
    ) -> None:
        """`layers`: what each needs, or how many usual ones there are, of the shape's sizes;
        `blocks` without the scrap block, which is added; `by_head` is the order for a CPU;
        `groups`: which layers share a block table, None: all."""
        self.shape = shape
        if isinstance(layers, int):
            layers = uniform(layers, shape.heads, shape.kv_heads, shape.head_dim)
        self.use(layers)
        self.blocks = blocks
        self.dtype = dtype
        self._overflows = dtype is torch.float16
        self._by_head = by_head
        self.groups = groups or one_group(self.needs)
        places = {
            store: (at, slot)
            for at, group in enumerate(self.groups)
            for slot, store in enumerate(group.stores)
        }
        self._group_of = [places[store][0] for store in range(len(places))]
        slots = []
        # All layers that share a slot have one width.
        for needs in stores(self.needs)[: max(len(group.stores) for group in self.groups)]:
            sizes = (blocks + 1, shape.block_size, 2, needs.kv_heads, needs.width)
            if self._by_head:
                sizes = (blocks + 1, 2, needs.kv_heads, shape.block_size, needs.width)
            slots.append(torch.zeros(sizes, dtype=dtype, device=device))
        self._stores = [slots[places[store][1]] for store in range(len(places))]
        self.layers = self._stores
        """Of each layer with keys and values of its own, whatever lies where: [blocks + 1,
        block_size, 2, kv_heads, width]."""
        self._arrays: list[Any] = []
        """The same for numpy, which stores a few positions in a third of torch's time."""
        if self._by_head:
            self.layers = [store.permute(0, 3, 1, 2, 4) for store in self._stores]
            self._arrays = [_array(layer) for layer in self.layers]
        # One layer is read at a time: a standing buffer spares the page faults of fresh memory.
        self._gathered = self._stores[0].new_empty(0)

    def use(self, layers: Sequence[LayerShape]) -> None:
        """Let layers attend as these descriptions say; where keys and values lie is the same."""
        self.needs = tuple(layers)
        """Of each layer that attends, in order."""
        alike = [replace(layer, store=0) for layer in self.needs]
        self.first_alike = tuple(alike.index(layer) for layer in alike)
        """Of each layer, the first that needs the same but for its store."""

    def own(self, layer: int, by_group: Sequence[_T] | Any) -> _T | Any:
        """A layer's part of what a layout has by group; with one group it has that of all."""
        return by_group if len(self.groups) == 1 else by_group[self._group_of[layer]]

    def group_of(self, layer: int) -> int:
        """Its place among the groups."""
        return self._group_of[layer]

    def trial_table(self, table: torch.Tensor) -> torch.Tensor:
        """Blocks of every group for rows of a trial, of whose own these are the numbers, from 1 on:
        [rows, blocks], as a layout has them."""
        count = len(self.groups)
        if count == 1:
            return table
        own = torch.arange(count, device=table.device)
        return (table[:, None] - 1) * count + 1 + own[:, None]

    @property
    def rooms(self) -> int:
        """Numbers that such a table may have: blocks, of all groups together one."""
        return self.blocks // len(self.groups)

    def write(self, layer: int, slots: Any, fresh: torch.Tensor) -> None:
        """Store keys and values, [tokens, 2, kv_heads, width], where a layout says: by block and
        position in it where they lie by head, else by flat position. What is no number is made one,
        in place."""
        slots = self.own(layer, slots)
        if self._overflows:
            fresh.nan_to_num_()
        if self._by_head:
            self._arrays[layer][slots] = _array(fresh)
        else:
            self._stores[layer].flatten(0, 1).index_copy_(0, slots, fresh)

    # ------------------------------------------------------------------ by head

    def runs(self, blocks: Any, kv_heads: int) -> torch.Tensor:  # [2 * kv_heads * blocks], int64
        """Where the keys and values of these blocks, [rows, blocks], lie: one run for a block and a
        head of either, in the order row, KV head, keys or values, block of the row."""
        per_block = 2 * kv_heads
        heads = np.arange(per_block).reshape(2, kv_heads).T
        runs = blocks[:, None, None, :] * per_block + heads[:, :, None]
        return torch.from_numpy(runs.reshape(-1))

    def room(self, runs: int, numbers: int) -> torch.Tensor:  # [runs, numbers]
        """Of the standing buffer, for `gather`."""
        if len(self._gathered) < runs * numbers:
            self._gathered = self._gathered.new_empty(runs * numbers)
        return self._gathered[: runs * numbers].view(runs, numbers)

    def gather(
        self,
        layer: int,
        runs: torch.Tensor,  # [runs], int64
        out: torch.Tensor,  # [runs, block_size * width]
    ) -> None:
        """Copies these runs of a layer's keys and values into `out`, made by `room`."""
        torch.index_select(self._stores[layer].view(-1, out.shape[1]), 0, runs, out=out)

    def clear(self) -> None:
        for layer in self.layers:
            layer.zero_()


def _array(x: torch.Tensor) -> Any:
    """The tensor's memory as numpy's array, which knows no bfloat16: its bits are as good."""
    return (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy()
