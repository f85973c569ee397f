"""Attention over copies: a layer's blocks are gathered, then torch's fused attention runs.

Runs on any device, and is what the other backends are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from replicas.kv_cache import (
    CacheShape,
    DeviceLayout,
    DeviceWindow,
    PagedCache,
    TokenRange,
    device_ranges,
)
from replicas.models.decoder import LayerAttention

AttendGathered = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor
]
"""Queries [rows, heads, width, head_dim], keys and values [rows, kv_heads, length, head_dim], a
mask [rows, 1, width, length] of 0 and -inf or None (causal), and the scale of scores; returns
[rows, width, heads, head_dim]."""


def fused_attention(
    query: torch.Tensor,  # [rows, heads, width, head_dim]
    key: torch.Tensor,  # [rows, kv_heads, length, head_dim]
    value: torch.Tensor,  # [rows, kv_heads, length, head_dim]
    mask: torch.Tensor | None,  # [rows, 1, width, length], 0 or -inf; None: causal
    scaling: float,
) -> torch.Tensor:  # [rows, width, heads, head_dim]
    """By torch; query heads that share a KV head become its rows, which spares copies of it."""
    rows, heads, width, dim = query.shape
    if mask is None:
        out = scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2)
    kv_heads, length = key.shape[1:3]
    group = heads // kv_heads
    folded = mask.expand(rows, group, width, length).reshape(rows, 1, group * width, length)
    query = query.reshape(rows, kv_heads, group * width, dim)
    out = scaled_dot_product_attention(query, key, value, attn_mask=folded, scale=scaling)
    return out.reshape(rows, heads, width, dim).transpose(1, 2)


class DeviceLayouts:
    """The index arithmetic of all backends on a device."""

    def __init__(self, cache: PagedCache, shape: CacheShape) -> None:
        self.cache = cache
        self.shape = shape

    def step_layout(self, table: torch.Tensor, starts: Sequence[int], width: int) -> DeviceLayout:
        return DeviceLayout(table, starts, width, self.shape)

    def ranges_layout(self, table: torch.Tensor, ranges: Sequence[TokenRange]) -> DeviceWindow:
        return device_ranges(table, ranges, self.shape)


class GatherBackend(DeviceLayouts):
    def __init__(
        self,
        cache: PagedCache,
        shape: CacheShape,
        attend: AttendGathered = fused_attention,
        name: str = "gather",
    ) -> None:
        super().__init__(cache, shape)
        self.name = name
        self._attend = attend

    def begin(self, layout: DeviceWindow, stride: int) -> LayerAttention:
        heads = self.shape.heads
        if layout.parts:
            # A mask would cost the prompts without a cached prefix torch's causal path.
            ways = [(places, self.begin(part, stride)) for places, part in layout.parts]

            def by_parts(layer: int, queries: torch.Tensor, scaling: float) -> torch.Tensor:
                out = queries.new_zeros(layout.padded, heads * queries.shape[-1])
                for places, way in ways:
                    own = queries.index_select(0, places)
                    out.index_copy_(0, places, way(layer, own, scaling)[: len(places)])
                return out

            return by_parts
        mask = layout.mask(self.cache.dtype)

        def attention(layer: int, queries: torch.Tensor, scaling: float) -> torch.Tensor:
            grid = layout.unpack(queries[:, :heads]).transpose(1, 2)
            keys, values = self.cache.read(layer, layout.blocks, layout.rows, layout.reach)
            return layout.pack(self._attend(grid, keys, values, mask, scaling)).flatten(1)

        return attention
