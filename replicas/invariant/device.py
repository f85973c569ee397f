"""Batch-invariant attention for `deterministic` models where the kernels do not run.

A library's kernel chooses how to split its sums by the shape it is given, so attention is computed
in chunks of one shape by plain operations.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from replicas.invariant.ops import TILE, in_tiles

CHUNK = 256
"""KV positions per chunk."""
_QUERIES = 16
"""Query tokens per tile of attention."""
_ITEMS = 64
"""(row, KV head, chunk) items per batched product."""


def chunked_attention(
    query: torch.Tensor,  # [rows, heads, width, head_dim]
    key: torch.Tensor,  # [rows, kv_heads, length, head_dim]
    value: torch.Tensor,  # [rows, kv_heads, length, head_dim]
    mask: torch.Tensor | None,  # [rows, 1, width, length], 0 or -inf; None: causal
    scaling: float,
) -> torch.Tensor:  # [rows, width, heads, head_dim]
    """In float32, by tiles of one shape.

    Each (row, KV head, chunk) is one item of a batched product; a chunk yields its greatest score,
    its sum of exponentials and its weighted values, which are then combined chunk after chunk.
    """
    rows, heads, width, dim = query.shape
    kv_heads, length = key.shape[1:3]
    group = heads // kv_heads
    chunks, tiles = -(-length // CHUNK), -(-width // _QUERIES)
    beyond, idle = chunks * CHUNK - length, tiles * _QUERIES - width
    hidden = pad(_mask(mask, query, length).float(), (0, beyond), value=-torch.inf)
    hidden = pad(hidden, (0, 0, 0, idle))  # padding sees what there is
    queries = pad(query.float() * scaling, (0, 0, 0, idle))
    queries = queries.reshape(rows, kv_heads, group, tiles, _QUERIES, dim)
    keys, values = (_in_chunks(tensor, chunks) for tensor in (key, value))
    out = []
    for tile in range(tiles):
        part = queries[:, :, :, tile].reshape(rows, kv_heads, 1, group * _QUERIES, dim)
        seen = hidden[:, :, tile * _QUERIES : (tile + 1) * _QUERIES]
        seen = seen.view(-1, 1, _QUERIES, chunks, CHUNK).permute(0, 1, 3, 2, 4)
        seen = seen[:, :, :, None].expand(rows, kv_heads, chunks, group, _QUERIES, CHUNK)
        best, total, weighted = _chunk_sums(
            part.expand(-1, -1, chunks, -1, -1).reshape(-1, group * _QUERIES, dim),
            keys,
            values,
            seen.reshape(-1, group * _QUERIES, CHUNK),
        )
        shape = (rows, kv_heads, chunks, group * _QUERIES)
        out.append(_combined(best.view(shape), total.view(shape), weighted.view(*shape, -1)))
    # [rows, kv_heads, tiles, group, queries, dim] -> [rows, tiles * queries, heads, dim]
    joined = torch.stack(out, dim=2).view(rows, kv_heads, tiles, group, _QUERIES, -1)
    joined = joined.permute(0, 2, 4, 1, 3, 5).reshape(rows, tiles * _QUERIES, heads, -1)
    return joined[:, :width].to(query.dtype)


def _mask(mask: torch.Tensor | None, query: torch.Tensor, length: int) -> torch.Tensor:
    if mask is not None:
        return mask
    hidden = query.new_full((query.shape[2], length), -torch.inf)
    return hidden.triu(1)[None, None]


def _in_chunks(
    tensor: torch.Tensor,  # [rows, kv_heads, length, dim]
    chunks: int,
) -> torch.Tensor:  # [rows * kv_heads * chunks, CHUNK, dim], float32, zeros beyond the length
    length, dim = tensor.shape[2:]
    return pad(tensor.float(), (0, 0, 0, chunks * CHUNK - length)).reshape(-1, CHUNK, dim)


def _chunk_sums(
    queries: torch.Tensor,  # [n, m, dim]
    keys: torch.Tensor,  # [n, CHUNK, dim]
    values: torch.Tensor,  # [n, CHUNK, dim]
    mask: torch.Tensor,  # [n, m, CHUNK]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # [n, m], [n, m], [n, m, dim]
    """Per item: the greatest score, the sum of exponentials below it, the values they weigh."""
    n = queries.shape[0]
    parts = []
    for begin in range(0, n, _ITEMS):
        q, k, v, hidden = (x[begin : begin + _ITEMS] for x in (queries, keys, values, mask))
        if n - begin < _ITEMS:
            idle = (0, 0, 0, 0, 0, begin + _ITEMS - n)
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
    share = in_tiles(torch.exp, TILE, below)
    total_sum = total[:, :, 0] * share[:, :, 0]
    weighted_sum = weighted[:, :, 0] * share[:, :, 0, :, None]
    for j in range(1, best.shape[2]):
        total_sum = total_sum + total[:, :, j] * share[:, :, j]
        weighted_sum = weighted_sum + weighted[:, :, j] * share[:, :, j, :, None]
    return weighted_sum / total_sum[..., None]
