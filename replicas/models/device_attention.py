"""The attention of a GPU: it reads keys and values where they lie in the paged cache; see
`replicas.kernels.paged_attention`.

It depends on lengths and tables through tensors alone, so a pass can be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import e, log2
from typing import Any

import torch

from replicas.errors import PairRefused
from replicas.invariant import PIECE
from replicas.kv_cache import (
    DevicePassLayout,
    DeviceStepLayout,
    LayerShape,
    PagedCache,
    TokenRange,
    device_ranges,
)
from replicas.models.decoder import LayerAttention
from replicas.models.paged_model import ERROR_FLOOR

QUERIES = 64
"""Rows of the kernel's matrix: query tokens times query heads per KV head, padded."""
_WARPS = 4
_ROWS = 4
_LENGTH_MOST = 600
"""Positions of the longest row that is tried out: some pieces."""
_WIDTHS = (1, 5)


class PagedBackend:
    name: str = "paged"

    def __init__(self, cache: PagedCache) -> None:
        """Raises PairRefused."""
        self.cache = cache
        try:
            from replicas.kernels import paged_attention as kernels
        except ImportError as error:
            raise PairRefused(f"attention on a GPU needs Triton: {error}") from None
        most = max(needs.heads // needs.kv_heads for needs in cache.needs)
        if most > QUERIES:
            raise PairRefused(
                f"{most} query heads share a KV head; attention on a GPU serves {QUERIES} at most"
            )
        self._kernels = kernels
        self.width_most = summed_in_pieces(most)

    def step_layout(
        self, table: torch.Tensor, starts: Sequence[int], width: int
    ) -> DeviceStepLayout:
        return DeviceStepLayout(table, starts, width, self.cache.shape)

    def ranges_layout(self, table: torch.Tensor, ranges: Sequence[TokenRange]) -> DevicePassLayout:
        return device_ranges(table, ranges, self.cache.shape)

    def begin(self, layout: DevicePassLayout) -> LayerAttention:
        kernels, cache = self._kernels, self.cache
        tables, starts = layout.tables, layout.starts
        firsts, counts = layout.runs
        of_rows, columns = (starts, firsts, counts), layout.table.shape[-1]
        pieces = -(-min(layout.reach, columns * cache.shape.block_size) // PIECE)

        def attention(
            layer: int, queries: torch.Tensor, scaling: float, sinks: torch.Tensor | None = None, /
        ) -> torch.Tensor:
            needs = cache.needs[layer]
            table = cache.own(needs.store, tables)
            group, kv_heads = needs.heads // needs.kv_heads, needs.kv_heads
            at_once = summed_in_pieces(group)
            whole, folded = layout.width > at_once, group * layout.width
            out = queries.new_empty((layout.padded, needs.heads * needs.value_dim))
            if layout.padded > layout.tokens:
                out[layout.tokens :] = 0
            if whole:
                parts, sums = out, out
                third = -(-layout.width // at_once)
            else:
                at = (layout.rows, kv_heads, pieces, folded)
                parts = queries.new_empty((*at, needs.value_dim), dtype=torch.float32)
                sums = queries.new_empty((*at, 2), dtype=torch.float32)
                third = pieces
            sizes = _sizes(needs, cache.shape.block_size)
            seen_before = needs.window or needs.chunk or 1
            bias = queries if sinks is None else sinks
            kernels.attend[layout.rows, kv_heads, third](
                *(queries, cache.layers[needs.store], parts, sums, table, *of_rows, bias),
                *(scaling * log2(e), (needs.soft_cap or 1.0) * log2(e), seen_before),
                *(queries.stride(0), queries.stride(1), table.stride(0), columns, pieces, folded),
                **sizes,
                DIM=needs.width,
                KEY=needs.head_dim,
                GROUP_ROWS=_power(group),
                QUERIES=QUERIES,
                KEYS=kernels.KEYS,
                WHOLE=whole,
                CAPPED=needs.soft_cap is not None,
                num_warps=_WARPS,
            )
            if not whole:
                kernels.add_pieces[layout.rows, kv_heads, folded](
                    *(parts, sums, out, *of_rows, bias, seen_before, columns, pieces, folded),
                    **sizes,
                    num_warps=1,
                )
            return out

        return attention


def _sizes(needs: LayerShape, block_size: int) -> dict[str, Any]:
    """What both kernels are made for."""
    return {
        "GROUP": needs.heads // needs.kv_heads,
        "VALUE": needs.value_dim,
        "DIMS": max(16, _power(needs.width)),
        "BLOCK": block_size,
        "PIECE": PIECE,
        "SEEN": 1 if needs.window is not None else 2 if needs.chunk is not None else 0,
        "SINKS": needs.sinks,
    }


def paged_backend(cache: PagedCache) -> PagedBackend:
    """The attention over a GPU's cache, tried out: on random keys and values, over rows of
    different lengths in blocks out of order, it computes what a plain one does, for each kind of
    layer.

    Called while no sequence has a block; the cache is cleared afterwards. Raises PairRefused.
    """
    backend = PagedBackend(cache)
    try:
        for layer in sorted(set(cache.first_alike)):
            _try_out(backend, layer)
    except PairRefused:
        raise
    except Exception as error:  # a kernel's compiler may raise anything
        raise PairRefused(f"Triton runs no attention on this device: {error}") from error
    finally:
        cache.clear()
    return backend


@torch.inference_mode()
def _try_out(backend: PagedBackend, layer: int) -> None:
    """Raises PairRefused where it computes something else than a plain attention."""
    cache, shape = backend.cache, backend.cache.shape
    rows = min(_ROWS, cache.blocks)
    room = min(cache.blocks // rows * shape.block_size, shape.context_len, _LENGTH_MOST)
    columns = -(-room // shape.block_size)
    used = cache.layers[cache.needs[layer].store][: rows * columns + 1]
    device = used.device
    used.copy_(torch.randn(used.shape, dtype=used.dtype, device=device))
    table = torch.arange(1, rows * columns + 1, device=device)
    table = table.view(columns, rows).flip(0).t().contiguous()
    if len(cache.groups) > 1:  # one layer is tried: the groups do not meet
        table = table[:, None].expand(-1, len(cache.groups), -1).contiguous()
    ends = [max(room >> row, 1) for row in range(rows)]
    for width in [width for width in _WIDTHS if width <= columns * shape.block_size]:
        starts = [max(end - width, 0) for end in ends]
        window = backend.step_layout(table, starts, width).window(0, width)
        _compare(backend, layer, window, [(start, start + width) for start in starts])
    ranges = [(end // 2, end) for end in ends]
    _compare(backend, layer, backend.ranges_layout(table, ranges), ranges)


def _compare(
    backend: PagedBackend, layer: int, window: DevicePassLayout, ranges: Sequence[TokenRange]
) -> None:
    cache, needs = backend.cache, backend.cache.needs[layer]
    scaling, device = needs.head_dim**-0.5, window.table.device
    queries = torch.randn(window.padded, needs.heads, needs.head_dim, device=device)
    queries = queries.to(cache.dtype)
    sinks = torch.randn(needs.heads, device=device).to(cache.dtype) if needs.sinks else None
    got = backend.begin(window)(layer, queries, scaling, sinks)[: window.tokens].float()
    expected, place = [], 0
    for row, (begin, end) in enumerate(ranges):
        own = queries[place : place + end - begin].float().transpose(0, 1)
        table = cache.own(needs.store, window.tables)
        kv = cache.layers[needs.store][table[row]].flatten(0, 1)[:end].float()
        keys, values = kv.permute(1, 2, 0, 3)  # [kv_heads, end, width], each
        keys, values = keys[..., : needs.head_dim], values[..., : needs.value_dim]
        last = torch.arange(begin, end, device=device)
        expected.append(plain_attention(own, keys, values, last, scaling, needs, sinks))
        place += end - begin
    plain = torch.cat(expected).flatten(1)
    limit = ERROR_FLOOR[cache.dtype] * plain.abs().max()
    if not bool((got - plain).abs().max() <= limit):  # NaN, too
        raise PairRefused("Triton's attention computes something else here than a plain one")


def plain_attention(
    query: torch.Tensor,  # [heads, tokens, head_dim]
    key: torch.Tensor,  # [kv_heads, positions, head_dim]
    value: torch.Tensor,  # [kv_heads, positions, value_dim]
    last: torch.Tensor,  # [tokens], int64: the last position that each token sees
    scale: float,
    needs: LayerShape,
    sinks: torch.Tensor | None = None,  # [heads]
) -> torch.Tensor:  # [tokens, heads, value_dim]
    """By the definition, over the positions of one row."""
    heads, tokens = query.shape[:2]
    key, value = (tensor.repeat_interleave(heads // tensor.shape[0], 0) for tensor in (key, value))
    positions = torch.arange(key.shape[1], device=query.device)
    last = last[:, None]
    seen = positions <= last
    if needs.window is not None:
        seen &= positions > last - needs.window
    if needs.chunk is not None:
        seen &= positions // needs.chunk == last // needs.chunk
    scores = query @ key.transpose(1, 2) * scale
    if needs.soft_cap is not None:
        scores = needs.soft_cap * torch.tanh(scores / needs.soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        beside = sinks.to(scores.dtype)[:, None, None].expand(heads, tokens, 1)
        weights = torch.cat((scores, beside), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(0, 1)


def summed_in_pieces(group: int) -> int:
    """Query tokens of a row up to which its pieces are summed side by side, where so many query
    heads share a KV head."""
    return QUERIES // _power(group)


def _power(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << (number - 1).bit_length()
