"""Proves that attention by batched products is softmax attention over each row's own positions,
whatever blocks the row has, and that no pass reads what an earlier one read."""

from __future__ import annotations

import pytest
import torch

from replicas import batched
from replicas.batched import Batched, Gathering, fits
from replicas.paged_cache import PagedCache
from replicas.windows import CacheShape, Layout, Window

HEADS, KV_HEADS, DIM = 6, 2, 8
BLOCK, BLOCKS, LAYERS = 4, 40, 2
SHAPE = CacheShape(BLOCK, 64, torch.float32)
SCALING = 0.3


def filled_cache() -> PagedCache:
    """Every number of it random, those that rows must not see large."""
    cache = PagedCache(LAYERS, KV_HEADS, DIM, BLOCKS, BLOCK, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for layer in cache._layers:
        layer.copy_(10 * torch.randn(layer.shape, generator=generator))
    return cache


def expected(
    cache: PagedCache,
    layer: int,
    queries: torch.Tensor,  # [rows, width, heads, head_dim]
    table: torch.Tensor,
    starts: list[int],
) -> torch.Tensor:  # [rows, width, heads * head_dim], float64
    """Query by query, head by head."""
    rows, width = queries.shape[:2]
    out = torch.empty((rows, width, HEADS, DIM), dtype=torch.float64)
    for row in range(rows):
        own = cache._layers[layer][table[row]].flatten(0, 1).double()  # [positions, 2, heads, dim]
        for column in range(width):
            keys, values = own[: starts[row] + column + 1].unbind(1)
            for head in range(HEADS):
                of = head // (HEADS // KV_HEADS)
                scores = keys[:, of] @ queries[row, column, head].double() * SCALING
                out[row, column, head] = scores.softmax(0) @ values[:, of]
    return out.flatten(2)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("starts", "parts"),
    [
        ([17, 17, 17], ()),
        ([3, 9, 24], ()),
        ([3, 9, 24], (1, 2)),
        ([3, 9, 24], (1, 1, 1)),
    ],
)
@torch.inference_mode()
def test_queries_get_the_attention_over_their_own_positions(
    starts: list[int], width: int, parts: tuple[int, ...]
) -> None:
    """All cells or some in any order, over one block table after the other."""
    cache = filled_cache()
    gathering = Gathering(cache)
    generator = torch.Generator().manual_seed(2)

    def checked(window: Window, table: torch.Tensor, cells: torch.Tensor) -> None:
        tokens = len(cells)
        cache.enter(window)
        attend = Batched(window, tokens, (HEADS, KV_HEADS, DIM), SCALING, cache, gathering)
        for layer in range(LAYERS):
            qkv = torch.randn((tokens, HEADS + 2 * KV_HEADS, DIM), generator=generator)
            grid = torch.zeros((3 * width, HEADS, DIM))
            grid[cells] = qkv[:, :HEADS]
            wanted = expected(cache, layer, grid.view(3, width, HEADS, DIM), table, starts)
            got = attend(layer, qkv)
            assert (got - wanted.flatten(0, 1)[cells]).abs().max() <= 1e-5 * wanted.abs().max()

    for _ in range(2):
        table = 1 + torch.randperm(BLOCKS - 1, generator=generator)[:24].view(3, 8)
        window = Layout(table, starts, width, SHAPE, parts=parts).window(0, width)
        checked(window, table, torch.arange(3 * width))
        cells = torch.randperm(3 * width, generator=generator)[: max(1, 2 * width)]
        checked(window.packed(cells), table, cells)


def test_a_pass_of_many_scores_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Layout(torch.arange(24).view(3, 8), [20, 3, 5], 2, SHAPE).window(0, 2)
    monkeypatch.setattr(batched, "SCORES_MOST", 3 * 2 * 22 * HEADS)
    assert fits(window, HEADS)
    assert not fits(window, HEADS + 1)
