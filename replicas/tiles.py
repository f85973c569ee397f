"""Tiles of one fixed shape: row-wise functions and attention whose results no batch mate changes.

What `replicas.deterministic` gives a model. Knows nothing of models or caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from replicas.model import refuse_other_maths, register_attention

TILED = "lockstep_tiled"
"""Attention in chunks by plain operations, for any device."""
EFFICIENT = "lockstep_efficient"
"""Attention by the memory-efficient CUDA kernel: blocks of fixed size, in order, never split."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The fixed sizes of a device."""

    rows: int
    """Token rows per tile. A GPU reads all weights per tile, so it holds those of a large step."""
    chunk: int
    """KV positions per chunk."""
    queries: int
    """Query tokens per tile of attention."""
    items: int
    """(row, KV head, chunk) items per batched product of attention."""


TILES = {"cpu": Tiles(16, 32, 4, 8), "cuda": Tiles(128, 256, 16, 64)}

_ALIGNED_BYTES = 64


def in_tiles(
    function: Callable[[torch.Tensor], torch.Tensor],
    tile: int,
    x: torch.Tensor,  # [..., width]
) -> torch.Tensor:  # [..., width of the function's result]
    """Apply a row-wise function to tiles of `tile` rows each, the last one padded with zeros."""
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    if rows % tile:
        flat = pad(flat, (0, 0, 0, -rows % tile))
    elif flat.data_ptr() % _ALIGNED_BYTES:
        flat = flat.clone()  # libraries choose kernels by alignment, too
    if flat.shape[0] == tile:
        out = function(flat)
    else:
        out = torch.cat([function(part) for part in torch.split(flat, tile)])
    return out[:rows].view(*x.shape[:-1], out.shape[-1])


def tiled_attention(
    module: nn.Module,
    query: torch.Tensor,  # [rows, heads, width, head_dim]
    key: torch.Tensor,  # [rows, kv_heads, length, head_dim]
    value: torch.Tensor,  # [rows, kv_heads, length, head_dim]
    attention_mask: torch.Tensor | None,  # [rows or 1, 1, width, length], 0 or -inf
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [rows, width, heads, head_dim]
    """Attention for transformers' interface, in float32 by tiles of one shape.

    Each (row, KV head, chunk) is one item of a batched product; a chunk yields its greatest score,
    its sum of exponentials and its weighted values, which are then combined chunk after chunk.
    """
    refuse_other_maths(kwargs)
    rows, heads, width, dim = query.shape
    kv_heads, length = key.shape[1:3]
    group = heads // kv_heads
    sizes = TILES[query.device.type]
    chunk, tokens = sizes.chunk, sizes.queries
    chunks, tiles = -(-length // chunk), -(-width // tokens)
    beyond, idle = chunks * chunk - length, tiles * tokens - width
    scale = dim**-0.5 if scaling is None else scaling

    # One copy each: with many rows of long content these are the largest tensors of a pass.
    masks = 1 if attention_mask is None else attention_mask.shape[0]
    mask = query.new_zeros((masks, 1, width + idle, length + beyond), dtype=torch.float32)
    mask[:, :, :width, length:].fill_(-torch.inf)
    if attention_mask is not None:
        mask[:, :, :width, :length] = attention_mask
    queries = pad(query.float() * scale, (0, 0, 0, idle))
    queries = queries.reshape(rows, kv_heads, group, tiles, tokens, dim)
    keys, values = (_in_chunks(tensor, chunk, chunks) for tensor in (key, value))
    out = []
    for tile in range(tiles):
        part = queries[:, :, :, tile].reshape(rows, kv_heads, 1, group * tokens, dim)
        seen = mask[:, :, tile * tokens : (tile + 1) * tokens]  # [rows or 1, 1, tokens, length]
        seen = seen.view(-1, 1, tokens, chunks, chunk).permute(0, 1, 3, 2, 4)
        seen = seen[:, :, :, None].expand(rows, kv_heads, chunks, group, tokens, chunk)
        best, total, weighted = _chunk_sums(
            part.expand(-1, -1, chunks, -1, -1).reshape(-1, group * tokens, dim),
            keys,
            values,
            seen.reshape(-1, group * tokens, chunk),
            sizes.items,
        )
        shape = (rows, kv_heads, chunks, group * tokens)
        out.append(_combined(best.view(shape), total.view(shape), weighted.view(*shape, -1)))
    # [rows, kv_heads, tiles, group, tokens, dim] -> [rows, tiles * tokens, heads, dim]
    joined = torch.stack(out, dim=2).view(rows, kv_heads, tiles, group, tokens, -1)
    joined = joined.permute(0, 2, 4, 1, 3, 5).reshape(rows, tiles * tokens, heads, -1)
    return joined[:, :width].to(query.dtype), None


def _in_chunks(
    tensor: torch.Tensor,  # [rows, kv_heads, length, dim]
    chunk: int,
    chunks: int,
) -> torch.Tensor:  # [rows * kv_heads * chunks, chunk, dim], float32, zeros beyond the length
    rows, kv_heads, length, dim = tensor.shape
    padded = tensor.new_zeros((rows, kv_heads, chunks * chunk, dim), dtype=torch.float32)
    padded[:, :, :length] = tensor
    return padded.view(-1, chunk, dim)


def _chunk_sums(
    queries: torch.Tensor,  # [n, m, dim]
    keys: torch.Tensor,  # [n, chunk, dim]
    values: torch.Tensor,  # [n, chunk, dim]
    mask: torch.Tensor,  # [n, m, chunk]
    items: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # [n, m], [n, m], [n, m, dim]
    """Per item: the greatest score, the sum of exponentials below it, the values they weigh."""
    n = queries.shape[0]
    parts = []
    for begin in range(0, n, items):
        q, k, v, hidden = (x[begin : begin + items] for x in (queries, keys, values, mask))
        if n - begin < items:
            idle = (0, 0, 0, 0, 0, begin + items - n)
            q, k, v, hidden = (pad(x, idle) for x in (q, k, v, hidden))
        scores = torch.bmm(q, k.transpose(1, 2)) + hidden
        best = scores.amax(dim=-1, keepdim=True)
        # A chunk without a visible position has no greatest score: its exponentials are all 0.
        power = (scores - best.masked_fill(best == -torch.inf, 0.0)).exp()
        parts.append((best[..., 0], power.sum(dim=-1), torch.bmm(power, v)))
    best, total, weighted = (torch.cat(tensors)[:n] for tensors in zip(*parts, strict=True))
    return best, total, weighted


def _combined(
    best: torch.Tensor,  # [rows, kv_heads, chunks, m]
    total: torch.Tensor,  # [rows, kv_heads, chunks, m]
    weighted: torch.Tensor,  # [rows, kv_heads, chunks, m, dim]
) -> torch.Tensor:  # [rows, kv_heads, m, dim]
    """Add the chunks up in order, each scaled to the greatest score of all."""
    below = best - best.amax(dim=2, keepdim=True)
    share = in_tiles(torch.exp, TILES[best.device.type].rows, below)
    total_sum = total[:, :, 0] * share[:, :, 0]
    weighted_sum = weighted[:, :, 0] * share[:, :, 0, :, None]
    for j in range(1, best.shape[2]):
        total_sum = total_sum + total[:, :, j] * share[:, :, j]
        weighted_sum = weighted_sum + weighted[:, :, j] * share[:, :, j, :, None]
    return weighted_sum / total_sum[..., None]


def efficient_attention(
    module: nn.Module,
    query: torch.Tensor,  # [rows, heads, width, head_dim]
    key: torch.Tensor,  # [rows, kv_heads, length, head_dim]
    value: torch.Tensor,  # [rows, kv_heads, length, head_dim]
    attention_mask: torch.Tensor | None,  # [rows or 1, 1, width, length], 0 or -inf
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [rows, width, heads, head_dim]
    """Attention by the memory-efficient kernel alone, always with a mask and in whole chunks.

    The kernel gives each block of queries to one thread block, which walks over the keys from the
    first to the last in blocks of one size; it does not split them among several.
    """
    refuse_other_maths(kwargs)
    rows, heads, width, dim = query.shape
    kv_heads, length = key.shape[1:3]
    group = heads // kv_heads
    beyond = -length % TILES[query.device.type].chunk
    mask = query.new_zeros((1, 1, width, length)) if attention_mask is None else attention_mask
    mask = pad(mask, (0, beyond), value=-torch.inf)
    mask = mask.expand(rows, group, -1, -1).reshape(rows, 1, group * width, length + beyond)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = scaled_dot_product_attention(
            query.reshape(rows, kv_heads, group * width, dim),
            pad(key, (0, 0, 0, beyond)),
            pad(value, (0, 0, 0, beyond)),
            attn_mask=mask.expand(-1, kv_heads, -1, -1),
            scale=scaling,
        )
    return out.reshape(rows, heads, width, value.shape[-1]).transpose(1, 2), None


register_attention(TILED, tiled_attention)
register_attention(EFFICIENT, efficient_attention)
