"""The paged attention of a device by plain operations of torch: for tests of what lies around it.

On a CPU Triton interprets its kernels one program after the other, which takes minutes where this
takes seconds.
"""

from __future__ import annotations

import torch

from replicas.kv_cache import DevicePassLayout
from replicas.models.decoder import LayerAttention
from replicas.models.device_attention import PagedBackend, plain_attention

Kernels = PagedBackend
"""The attention that is served, also where `GatherBackend` stands for it."""


class GatherBackend(PagedBackend):
    """Copies the KV of all rows, as far as the longest reads; a query sees its own part of it.

    In float64, so that what is rounded at the end has the same bits whatever the batch.
    """

    def begin(self, layout: DevicePassLayout) -> LayerAttention:
        size = self.cache.shape.block_size
        reach = -(-layout.reach // size)
        last = layout.grid.clamp(min=0)

        def attention(
            layer: int, queries: torch.Tensor, scaling: float, sinks: torch.Tensor | None = None, /
        ) -> torch.Tensor:
            needs = self.cache.needs[layer]
            table = self.cache.own(needs.store, layout.tables)[:, :reach]
            kv = self.cache.layers[needs.store][table].flatten(1, 2).double()
            keys, values = kv.permute(2, 0, 3, 1, 4)  # [rows, kv_heads, positions, width], each
            grid = spread(layout, queries[:, : needs.heads]).transpose(1, 2).double()
            rows = [
                plain_attention(
                    grid[row],
                    keys[row, ..., : needs.head_dim],
                    values[row, ..., : needs.value_dim],
                    last[row],
                    scaling,
                    needs,
                    sinks,
                )
                for row in range(layout.rows)
            ]
            return gathered(layout, torch.stack(rows).flatten(2)).to(queries.dtype)

        return attention


def spread(window: DevicePassLayout, x: torch.Tensor) -> torch.Tensor:  # [rows, width, ...]
    """What the tokens have, [padded tokens, ...], in the window's grid; other cells are 0."""
    x = x[: window.tokens]
    cells = window.cells
    if cells is None:
        cells = torch.arange(window.tokens, device=x.device)
    flat = x.new_zeros((window.rows * window.width, *x.shape[1:]))
    return flat.index_copy_(0, cells, x).view(window.rows, window.width, *x.shape[1:])


def gathered(window: DevicePassLayout, grid: torch.Tensor) -> torch.Tensor:  # [padded tokens, ...]
    """What the tokens have of the grid, [rows, width, ...]; padding is 0."""
    flat = grid.flatten(0, 1)
    own = flat if window.cells is None else flat.index_select(0, window.cells)
    return torch.cat((own, own.new_zeros((window.padded - window.tokens, *own.shape[1:]))))
