"""Attention that reads keys and values where they lie in the paged cache; nothing is gathered.

Two ways that torch offers, where they run:

- `FlexAttention` (Dong et al., 2024). All blocks are one long sequence of keys; a block mask lists
  each row's own in their order, and a mask function turns a physical position back into a logical
  one. On a CPU it runs unfused: slow, but it shows that the masks are right.
- `VarlenAttention`: variable-length FlashAttention with block tables, from torch 2.12 on, on GPUs.

Neither depends on the values of lengths or tables but through tensors, so a pass can be recorded.
The portable way is `gather`; `choice` decides which one is taken.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

from replicas.kv_cache import SCRAP_BLOCK, CacheShape, DeviceWindow, PagedCache
from replicas.models.attention.gather import DeviceLayouts, GatherBackend
from replicas.models.decoder import LayerAttention

AttendPaged = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Queries [rows, heads, width, head_dim], keys and values [blocks + 1, block_size, kv_heads,
head_dim] of the whole cache, and the scale of scores; returns [rows, width, heads, head_dim].
Queries that see nothing get 0."""

_FLEX_BLOCK_LEAST = 16
"""Positions: a GPU multiplies matrices of at least 16 rows."""
_FLEX_TILE_MOST = 64
"""Positions that a GPU reads at once; a block is one or several tiles."""
_FLEX_QUERIES = 128
"""Queries of one entry of a block mask, at least."""
_RECOMPILES = 1 << 16
"""More than there are shapes."""


class NotPaged(Exception):
    """Torch, the device or the cache does not fit this attention; the message says what."""


class PagedBackend(DeviceLayouts):
    """Steps, and prefills where it fills, by a paged attention."""

    reads_apart: bool = True

    def __init__(
        self, cache: PagedCache, shape: CacheShape, attention: FlexAttention | VarlenAttention
    ) -> None:
        super().__init__(cache, shape)
        self.name: str = attention.name
        self._attention = attention
        self._gather = GatherBackend(cache, shape)

    def begin(self, layout: DeviceWindow, stride: int) -> LayerAttention:
        prefills = layout.cells is not None or bool(layout.parts)
        if layout.causal or (prefills and not self._attention.fills):
            # Without a cached prefix torch's causal path needs no mask and no table.
            return self._gather.begin(layout, stride)
        heads = self.shape.heads
        attend = self._attention.enter(layout)

        def attention(layer: int, queries: torch.Tensor, scaling: float) -> torch.Tensor:
            grid = layout.unpack(queries[:, :heads]).transpose(1, 2)
            out = attend(grid, *self.cache.all_of(layer), scaling)
            return layout.pack(out).flatten(1)

        return attention


class FlexAttention:
    """On a GPU each shape of a pass is compiled once, which takes seconds: a kernel for several
    batch sizes would not divide a row's keys among thread blocks."""

    name = "flex"

    def __init__(
        self, blocks: int, block_size: int, context_len: int, device: torch.device
    ) -> None:
        """`blocks` without the scrap block. Raises NotPaged."""
        try:
            from torch.nn.attention.flex_attention import BlockMask, flex_attention
        except ImportError as error:
            raise NotPaged(f"this torch has no FlexAttention: {error}") from None
        on_gpu = device.type == "cuda"
        if on_gpu and (block_size < _FLEX_BLOCK_LEAST or block_size & (block_size - 1)):
            raise NotPaged(
                f"block_size is {block_size}; on a GPU FlexAttention takes powers of two from"
                f" {_FLEX_BLOCK_LEAST} on"
            )
        self.fills = not on_gpu
        self._blocks = blocks
        self._block_size = block_size
        # Lists of one length, whatever the table's: fewer shapes to compile for.
        self._columns = -(-context_len // block_size) if on_gpu else 0
        options: Any = {"BLOCK_N": min(block_size, _FLEX_TILE_MOST)} if on_gpu else None

        def attend(
            query: torch.Tensor,  # [rows, heads, width, head_dim]
            keys: torch.Tensor,  # [blocks + 1, block_size, kv_heads, head_dim]
            values: torch.Tensor,
            logical: torch.Tensor,  # [rows, blocks + 1], int32
            starts: torch.Tensor,  # [rows], int64
            counts: torch.Tensor,  # [rows, 1, 1], int32
            listed: torch.Tensor,  # [rows, 1, 1, columns], int32
            scaling: float,
        ) -> torch.Tensor:  # [rows, heads, width, head_dim]
            def seen(
                b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
            ) -> torch.Tensor:
                block = logical[b, kv_idx // block_size]
                position = block * block_size + kv_idx % block_size
                return (block >= 0) & (position <= starts[b] + q_idx)

            width, group = query.shape[2], query.shape[1] // keys.shape[2]
            mask = BlockMask.from_kv_blocks(
                counts,
                listed,
                # No block counts as full: a kernel divides the listed ones among its thread
                # blocks, but full ones as if a row could have the whole cache.
                BLOCK_SIZE=(_queries_per_entry(width * group), block_size),
                mask_mod=seen,
                seq_lengths=(width, keys.shape[0] * block_size),
                compute_q_blocks=False,
            )
            out = flex_attention(
                query,
                keys.flatten(0, 1).transpose(0, 1)[None],
                values.flatten(0, 1).transpose(0, 1)[None],
                block_mask=mask,
                scale=scaling,
                enable_gqa=True,
                kernel_options=options,
            )
            assert isinstance(out, torch.Tensor)
            return out

        if on_gpu:
            attend = torch.compile(attend, dynamic=False, fullgraph=True)
            # By default torch gives up after a few shapes.
            attend = torch._dynamo.config.patch(
                recompile_limit=_RECOMPILES, accumulated_recompile_limit=_RECOMPILES
            )(attend)
        else:
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        self._attend = attend

    def enter(self, window: DeviceWindow) -> AttendPaged:
        table = window.blocks.view(window.rows, -1)
        rows, columns = table.shape
        logical = logical_blocks(table, self._blocks)
        # A step of another draft length has another stride, and would be compiled for.
        starts = window.starts.clone(memory_format=torch.contiguous_format)
        # A row reads from its first position to the end of its window.
        reach = (starts + (window.width + self._block_size - 1)) // self._block_size
        counts = reach.clamp(0, columns).to(torch.int32).view(rows, 1, 1)
        listed = pad(table, (0, max(0, self._columns - columns)), value=SCRAP_BLOCK)
        listed = listed.to(torch.int32).view(rows, 1, 1, -1)

        def attend(
            query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
        ) -> torch.Tensor:
            out: torch.Tensor = self._attend(
                query, keys, values, logical, starts, counts, listed, scaling
            )
            return out.transpose(1, 2)

        return attend


def logical_blocks(
    table: torch.Tensor,  # [rows, columns], int64
    blocks: int,
) -> torch.Tensor:  # [rows, blocks + 1], int32
    """The table's inverse: which column of a row a physical block is, -1 where it is none."""
    rows, columns = table.shape
    numbers = torch.arange(columns, dtype=torch.int32, device=table.device)
    inverse = torch.full((rows, blocks + 1), -1, dtype=torch.int32, device=table.device)
    inverse.scatter_(1, table, numbers.expand(rows, -1))
    inverse[:, SCRAP_BLOCK].fill_(-1)  # it pads tables, and several columns of one
    return inverse


def _queries_per_entry(queries: int) -> int:
    """All queries of a row that share a KV head, in one entry of the block mask."""
    return max(_FLEX_QUERIES, 1 << (queries - 1).bit_length())


class VarlenAttention:
    """FlashAttention for sequences of various lengths, with a block table."""

    name = "varlen"
    fills = True

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raises NotPaged. What block sizes the kernel takes shows when it runs."""
        if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
            raise NotPaged("varlen attention needs a GPU and float16 or bfloat16")
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError as error:
            raise NotPaged(f"this torch has no varlen attention: {error}") from None
        if "block_table" not in inspect.signature(varlen_attn).parameters:
            raise NotPaged("this torch's varlen attention takes no block table")
        self._varlen: Callable[..., Any] = varlen_attn

    def enter(self, window: DeviceWindow) -> AttendPaged:
        rows, width = window.rows, window.width
        device = window.blocks.device
        table = window.blocks.view(rows, -1).to(torch.int32)
        # Of no position before the first, and none in the row that only pads.
        used = (window.starts + width).clamp(min=0).to(torch.int32)
        numbers = torch.arange(rows + 1, dtype=torch.int32, device=device)
        begins, room = numbers * width, numbers * window.reach

        def attend(
            query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
        ) -> torch.Tensor:
            heads, dim = query.shape[1], query.shape[3]
            out: torch.Tensor = self._varlen(
                query.transpose(1, 2).reshape(rows * width, heads, dim),
                keys,
                values,
                begins,
                room,
                width,
                window.reach,
                scale=scaling,
                window_size=(-1, 0),  # causal; a window's last query sees all that is used
                enable_gqa=heads != keys.shape[2],
                seqused_k=used,
                block_table=table,
                # Torch 2.13 returns wrong rows where it splits a row's keys (its issue 194167).
                num_splits=1,
            )
            return out.view(rows, width, heads, dim)

        return attend
