"""The attention of a GPU: it reads keys and values where they lie in the paged cache; see
`replicas.kernels.paged_attention`.

It depends on lengths and tables through tensors alone, so a pass can be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import e, log2

import torch

from replicas.errors import PairRefused
from replicas.invariant import PIECE
from replicas.kv_cache import (
    DevicePassLayout,
    DeviceStepLayout,
    PagedCache,
    TokenRange,
    device_ranges,
)
from replicas.models.decoder import LayerAttention
from replicas.models.paged_model import ERROR_FLOOR, plain_attention

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
        self._group = cache.shape.heads // cache.shape.kv_heads
        if self._group > QUERIES:
            raise PairRefused(
                f"{self._group} query heads share a KV head; attention on a GPU serves"
                f" {QUERIES} at most"
            )
        self._kernels = kernels
        self._group_rows = _power(self._group)
        self.width_most = summed_in_pieces(self._group)

    def step_layout(
        self, table: torch.Tensor, starts: Sequence[int], width: int
    ) -> DeviceStepLayout:
        return DeviceStepLayout(table, starts, width, self.cache.shape)

    def ranges_layout(self, table: torch.Tensor, ranges: Sequence[TokenRange]) -> DevicePassLayout:
        return device_ranges(table, ranges, self.cache.shape)

    def begin(self, layout: DevicePassLayout, stride: int) -> LayerAttention:
        kernels, shape, group = self._kernels, self.cache.shape, self._group
        rows, kv_heads, dim = layout.rows, shape.kv_heads, shape.head_dim
        table, starts = layout.table, layout.starts
        firsts, counts = layout.runs
        columns = table.shape[1]
        dims = max(16, _power(dim))
        whole = layout.width > self.width_most
        pieces = -(-min(layout.reach, columns * shape.block_size) // PIECE)
        folded = group * layout.width
        sizes = {"GROUP": group, "DIM": dim, "DIMS": dims, "BLOCK": shape.block_size}
        sizes["PIECE"] = PIECE

        def attention(layer: int, queries: torch.Tensor, scaling: float) -> torch.Tensor:
            out = queries.new_empty((layout.padded, kv_heads * group * dim))
            if layout.padded > layout.tokens:
                out[layout.tokens :] = 0
            if whole:
                parts, sums = out, out
                third = -(-layout.width // self.width_most)
            else:
                at = (rows, kv_heads, pieces, folded)
                parts = queries.new_empty((*at, dim), dtype=torch.float32)
                sums = queries.new_empty((*at, 2), dtype=torch.float32)
                third = pieces
            of_rows = (starts, firsts, counts)
            kernels.attend[rows, kv_heads, third](
                *(queries, self.cache.layers[layer], parts, sums, table, *of_rows),
                scaling * log2(e),
                *(queries.stride(0), queries.stride(1), table.stride(0), columns, pieces, folded),
                **sizes,
                GROUP_ROWS=self._group_rows,
                QUERIES=QUERIES,
                KEYS=kernels.KEYS,
                WHOLE=whole,
                num_warps=_WARPS,
            )
            if not whole:
                kernels.add_pieces[rows, kv_heads, folded](
                    *(parts, sums, out, *of_rows, columns, pieces, folded), **sizes, num_warps=1
                )
            return out

        return attention


def paged_backend(cache: PagedCache) -> PagedBackend:
    """The attention over a GPU's cache, tried out: on random keys and values, over rows of
    different lengths in blocks out of order, it computes what a plain one does.

    Called while no sequence has a block; the cache is cleared afterwards. Raises PairRefused.
    """
    backend = PagedBackend(cache)
    try:
        _try_out(backend)
    except PairRefused:
        raise
    except Exception as error:  # a kernel's compiler may raise anything
        raise PairRefused(f"Triton runs no attention on this device: {error}") from error
    finally:
        cache.clear()
    return backend


@torch.inference_mode()
def _try_out(backend: PagedBackend) -> None:
    """Raises PairRefused where it computes something else than a plain attention."""
    cache, shape = backend.cache, backend.cache.shape
    rows = min(_ROWS, cache.blocks)
    room = min(cache.blocks // rows * shape.block_size, shape.context_len, _LENGTH_MOST)
    columns = -(-room // shape.block_size)
    used = cache.layers[0][: rows * columns + 1]
    device = used.device
    used.copy_(torch.randn(used.shape, dtype=used.dtype, device=device))
    table = torch.arange(1, rows * columns + 1, device=device)
    table = table.view(columns, rows).flip(0).t().contiguous()
    ends = [max(room >> row, 1) for row in range(rows)]
    for width in [width for width in _WIDTHS if width <= columns * shape.block_size]:
        starts = [max(end - width, 0) for end in ends]
        window = backend.step_layout(table, starts, width).window(0, width)
        _compare(backend, window, [(start, start + width) for start in starts])
    ranges = [(end // 2, end) for end in ends]
    _compare(backend, backend.ranges_layout(table, ranges), ranges)


def _compare(backend: PagedBackend, window: DevicePassLayout, ranges: Sequence[TokenRange]) -> None:
    cache, shape = backend.cache, backend.cache.shape
    vectors, scaling = shape.heads + 2 * shape.kv_heads, shape.head_dim**-0.5
    queries = torch.randn(window.padded, vectors, shape.head_dim, device=window.table.device)
    queries = queries.to(cache.dtype)
    got = backend.begin(window, vectors)(0, queries, scaling)[: window.tokens].float()
    expected, place = [], 0
    for row, (begin, end) in enumerate(ranges):
        own = queries[place : place + end - begin, : shape.heads].float().transpose(0, 1)
        kv = cache.layers[0][window.table[row]].flatten(0, 1)[:end].float()
        keys, values = kv.permute(1, 2, 0, 3)  # [kv_heads, end, head_dim], each
        expected.append(plain_attention(own[None], keys[None], values[None], scaling)[0])
        place += end - begin
    plain = torch.cat(expected).flatten(1)
    limit = ERROR_FLOOR[cache.dtype] * plain.abs().max()
    if not bool((got - plain).abs().max() <= limit):  # NaN, too
        raise PairRefused("Triton's attention computes something else here than a plain one")


def summed_in_pieces(group: int) -> int:
    """Query tokens of a row up to which its pieces are summed side by side, where so many query
    heads share a KV head."""
    return QUERIES // _power(group)


def _power(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << (number - 1).bit_length()
