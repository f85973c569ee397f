"""Attention that reads keys and values where they lie in the paged cache; see
`replicas.kernels.attention`.

It depends on lengths and tables through tensors alone, so a pass can be recorded.
"""

from __future__ import annotations

from math import e, log2

import torch

from replicas.invariant import CHUNK
from replicas.kv_cache import CacheShape, DeviceWindow, PagedCache
from replicas.models.attention.gather import DeviceLayouts
from replicas.models.decoder import LayerAttention

PIECE = CHUNK
"""Positions whose weighted values are summed in one go: as many as the proof of `deterministic`
goes beyond."""
_WARPS = 4


class NotPaged(Exception):
    """Nothing compiles such kernels here, or heads are too many; the message says which."""


class PagedBackend(DeviceLayouts):
    name: str = "paged"

    def __init__(self, cache: PagedCache, shape: CacheShape) -> None:
        """Raises NotPaged."""
        super().__init__(cache, shape)
        try:
            from replicas.kernels import attention as kernels
        except ImportError as error:
            raise NotPaged(f"Triton is not here: {error}") from None
        self._group = shape.heads // shape.kv_heads
        if self._group > kernels.QUERIES:
            raise NotPaged(f"{self._group} query heads share a KV head; {kernels.QUERIES} may")
        self._kernels = kernels
        self._group_rows = _power(self._group)
        self.width_most = kernels.QUERIES // self._group_rows
        """Query tokens of a row up to which its pieces are summed side by side."""

    def begin(self, layout: DeviceWindow, stride: int) -> LayerAttention:
        kernels, shape, group = self._kernels, self.shape, self._group
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
                QUERIES=kernels.QUERIES,
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


def _power(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << (number - 1).bit_length()
