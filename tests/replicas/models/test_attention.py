"""Proves that every attention over a paged cache sees what a plain one sees, whatever lies where,
and that the kernels are taken only if they do.

On a CPU Triton interprets them, one program after the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from replicas.invariant.device import chunked_attention
from replicas.kernels import attention as kernels
from replicas.kv_cache import SCRAP_BLOCK, CacheShape, PagedCache
from replicas.kv_cache.device_layout import DeviceLayout, DeviceWindow, device_ranges
from replicas.models.attention import (
    AttentionRefused,
    GatherBackend,
    NotPaged,
    PagedBackend,
    choose_attention,
    fused_attention,
    paged,
)
from replicas.models.paged_model import AttentionBackend
from tests.oracle.worlds import check_answers, greedy_answers, sampled_answers
from tests.tiny_pairs import DEVICE, tiny_replica

DIM = 12


@pytest.fixture(autouse=True, scope="module")
def _several_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "PIECE", 32)
        patch.setattr(kernels, "KEYS", 16)
        yield


class World:
    """One layer's cache with random contents, and rows whose blocks are drawn at random."""

    def __init__(
        self, seed: int, block_size: int, heads: tuple[int, int], lengths: list[int]
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads = heads
        self.shape = CacheShape(block_size, 96, self.heads, self.kv_heads, DIM)
        blocks = 260
        self.cache = PagedCache(
            1, self.kv_heads, DIM, blocks, block_size, torch.float32, torch.device(DEVICE)
        )
        (layer,) = self.cache.layers
        layer.copy_(torch.randn(layer.shape, generator=generator))
        layer[SCRAP_BLOCK] = 1e4  # whatever attends there is found out
        rng = random.Random(seed)
        free = rng.sample(range(1, blocks + 1), blocks)
        owned = [-(-length // block_size) + rng.randrange(3) for length in lengths]  # some ahead
        tables = [[free.pop() for _ in range(count)] for count in owned]
        width = max(map(len, tables))
        padded = [t + [SCRAP_BLOCK] * (width - len(t)) for t in tables]
        self.table = torch.tensor(padded, device=DEVICE)

    def backend(self, name: str) -> AttentionBackend:
        if name == "paged":
            return PagedBackend(self.cache, self.shape)
        way = {"chunked": chunked_attention, "gather": fused_attention}[name]
        return GatherBackend(self.cache, self.shape, way)

    def plain(self, window: DeviceWindow, queries: torch.Tensor) -> torch.Tensor:
        """One query after the other, over the positions of its own row."""
        grid = window.unpack(queries)
        out = torch.zeros_like(grid)
        (layer,) = self.cache.layers
        for row in range(window.rows):
            kv = layer[self.table[row]].flatten(0, 1)  # [positions, 2, kv_heads, dim]
            for column in range(window.width):
                seen = kv[: max(int(window.starts[row]) + column, 0) + 1]
                keys, values = seen.repeat_interleave(self.heads // self.kv_heads, 2).unbind(1)
                scores = torch.einsum("hd,khd->hk", grid[row, column], keys) * DIM**-0.5
                out[row, column] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
        return window.pack(out).flatten(1)


@pytest.mark.parametrize("name", ["gather", "paged", "chunked"])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 999),
    block_size=st.sampled_from([1, 3, 4, 16]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]),
    starts=st.lists(st.integers(-1, 30), min_size=1, max_size=4),
    width=st.sampled_from([1, 2, 5, 9]),
    kind=st.sampled_from(["window", "later window", "ranges", "some cached", "prompts"]),
)
def test_rows_of_any_lengths_get_what_a_plain_attention_gives(
    name: str,
    seed: int,
    block_size: int,
    heads: tuple[int, int],
    starts: list[int],
    width: int,
    kind: str,
) -> None:
    world_ = World(seed, block_size, heads, [start + 2 * width for start in starts])
    if "window" not in kind:
        starts = [max(start, 0) for start in starts]
    if kind == "window":
        window = DeviceLayout(world_.table, starts, width, world_.shape).window(0, width)
    elif kind == "later window":
        window = DeviceLayout(world_.table, starts, width + 1, world_.shape).window(1, width + 1)
    elif kind == "ranges":
        ranges = [(start, start + 1 + row % width) for row, start in enumerate(starts)]
        window = device_ranges(world_.table, ranges, world_.shape)
    elif kind == "some cached":
        ranges = [(start if row % 2 else 0, start + 1) for row, start in enumerate(starts)]
        window = device_ranges(world_.table, ranges, world_.shape)
        assert [part.causal for _, part in window.parts] in ([], [True, False])
    else:
        window = device_ranges(world_.table, [(0, start + 1) for start in starts], world_.shape)
        assert window.causal
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn((window.tokens, heads[0], DIM), generator=generator).to(DEVICE)
    attention = world_.backend(name).begin(window, heads[0])
    got = attention(0, queries, DIM**-0.5)
    assert torch.allclose(got, world_.plain(window, queries), atol=1e-4)


# --------------------------------------------------------------------------- the choice


@pytest.mark.parametrize("mistake", ["a scale", "a position more", "another row"])
def test_an_attention_that_computes_something_else_is_refused_or_left_out(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = PagedBackend.begin

    def wrong(self: PagedBackend, window: DeviceWindow, stride: int) -> Any:
        if mistake == "a position more":
            window.starts = window.starts + 1
        if mistake == "another row":
            window.starts = window.starts.flip(0)
        attend = begin(self, window, stride)
        factor = 1.01 if mistake == "a scale" else 1.0
        return lambda layer, queries, scaling: attend(layer, queries, scaling * factor)

    monkeypatch.setattr(PagedBackend, "begin", wrong)
    world = World(0, 4, (2, 1), [9])
    with pytest.raises(AttentionRefused, match="something else"):
        choose_attention(world.cache, world.shape, "paged")
    assert choose_attention(world.cache, world.shape, "auto").name == "gather"


def test_what_does_not_fit_is_refused_by_name_and_left_out_by_auto() -> None:
    """A kernel has no room for so many query heads per KV head."""
    world = World(0, 4, (65, 1), [9])
    with pytest.raises(NotPaged, match="65 query heads"):
        PagedBackend(world.cache, world.shape)
    with pytest.raises(AttentionRefused, match="65 query heads"):
        choose_attention(world.cache, world.shape, "paged")
    assert choose_attention(world.cache, world.shape, "auto").name == "gather"


def test_output_is_the_same_by_paged_attention() -> None:
    settings = {"graphs": "on", "plan_rows": 2, "plan_draft_len": 2}
    replica = tiny_replica("qwen3", attention="paged", **settings)
    assert replica.spec.attention == "paged"
    for answered in (greedy_answers("qwen3"), sampled_answers("qwen3")):
        check_answers(replica, answered[:2], 2, 2)
