"""Proves that attention on a device sees what a plain one sees, whatever lies where, and that a
model is refused where it does not.

On a CPU Triton interprets them, one program after the other.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from replicas.errors import PairRefused
from replicas.kernels import paged_attention as kernels
from replicas.kv_cache import SCRAP_BLOCK, BlockGroup, CacheShape, LayerShape, PagedCache
from replicas.kv_cache.device_layout import DevicePassLayout, DeviceStepLayout, device_ranges
from replicas.models import device_attention as attention
from replicas.models.device_attention import paged_backend
from tests.gathering import GatherBackend, Kernels, gathered, spread
from tests.oracle.drafters import replica_of
from tests.oracle.worlds import check_answers, greedy_answers, sampled_answers
from tests.tiny_pairs import DEVICE, tiny_pair

DIM = 12


@pytest.fixture(autouse=True, scope="module")
def _several_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "PIECE", 32)
        patch.setattr(kernels, "KEYS", 16)
        yield


class World:
    """One layer's cache with random contents, and rows whose blocks are drawn at random."""

    def __init__(
        self,
        seed: int,
        block_size: int,
        heads: tuple[int, int],
        lengths: list[int],
        form: dict[str, Any] | None = None,
        grouped: bool = False,
    ) -> None:
        """`grouped`: the layer's table is the second of two, and slides."""
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads = heads
        usual = {"head_dim": DIM, "value_dim": DIM}
        self.needs = LayerShape(*heads, **{**usual, **(form or {})})
        self.sinks = torch.randn(self.heads, generator=generator).to(DEVICE)
        self.shape = CacheShape.of(block_size, 96, [self.needs])
        blocks, device = 260, torch.device(DEVICE)
        self.group = BlockGroup((0,), self.needs.window, self.needs.chunk)
        groups = (BlockGroup(()), self.group) if grouped else None
        sizes = (blocks, torch.float32, device)
        self.cache = PagedCache(self.shape, [self.needs], *sizes, groups=groups)
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

    def tables(self, begins: list[int]) -> torch.Tensor:
        """What a layout is given; a table that slides lacks what no query from here on sees."""
        if len(self.cache.groups) == 1:
            return self.table
        own = self.table.clone()
        for row, begin in enumerate(begins):
            first = self.group.first_block(max(begin, 0), self.shape.block_size)
            own[row, :first] = SCRAP_BLOCK
        return torch.stack((torch.zeros_like(own), own), 1)

    def plain(self, window: DevicePassLayout, queries: torch.Tensor) -> torch.Tensor:
        """One query after the other, over the positions of its own row."""
        grid, needs = spread(window, queries), self.needs
        out = grid.new_zeros((*grid.shape[:3], needs.value_dim))
        (layer,) = self.cache.layers
        for row in range(window.rows):
            kv = layer[self.table[row]].flatten(0, 1)  # [positions, 2, kv_heads, width]
            for column in range(window.width):
                last = max(int(window.starts[row]) + column, 0)
                first = 0
                if needs.window is not None:
                    first = max(last - needs.window + 1, 0)
                if needs.chunk is not None:
                    first = last // needs.chunk * needs.chunk
                seen = kv[first : last + 1]
                keys, values = seen.repeat_interleave(self.heads // self.kv_heads, 2).unbind(1)
                keys, values = keys[..., : needs.head_dim], values[..., : needs.value_dim]
                scores = torch.einsum("hd,khd->hk", grid[row, column], keys) * DIM**-0.5
                if needs.soft_cap is not None:
                    scores = needs.soft_cap * torch.tanh(scores / needs.soft_cap)
                weights = scores.exp()
                total = weights.sum(-1, keepdim=True)
                if needs.sinks:
                    total += self.sinks[:, None].exp()
                out[row, column] = torch.einsum("hk,khd->hd", weights / total, values)
        return gathered(window, out).flatten(1)


FORMS: list[dict[str, Any]] = [
    {},
    {"window": 7},
    {"window": 40},
    {"chunk": 9},
    {"soft_cap": 0.7},
    {"sinks": True},
    {"value_dim": 5},
    {"value_dim": 17},
    {"window": 7, "soft_cap": 0.7, "sinks": True, "value_dim": 5},
]


@pytest.mark.parametrize("backend", [Kernels, GatherBackend])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    block_size=st.sampled_from([1, 3, 4, 16]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]),
    starts=st.lists(st.integers(-1, 30), min_size=1, max_size=4),
    width=st.sampled_from([1, 2, 5, 9]),
    kind=st.sampled_from(["window", "later window", "ranges", "prompts"]),
    form=st.sampled_from(FORMS),
    grouped=st.booleans(),
)
def test_rows_of_any_lengths_get_what_a_plain_attention_gives(
    backend: type[Kernels],
    seed: int,
    block_size: int,
    heads: tuple[int, int],
    starts: list[int],
    width: int,
    kind: str,
    form: dict[str, Any],
    grouped: bool,
) -> None:
    lengths = [start + 2 * width for start in starts]
    world_ = World(seed, block_size, heads, lengths, form, grouped)
    if "window" not in kind:
        starts = [max(start, 0) for start in starts]
    tables = world_.tables(starts)
    if kind == "window":
        window = DeviceStepLayout(tables, starts, width, world_.shape).window(0, width)
    elif kind == "later window":
        window = DeviceStepLayout(tables, starts, width + 1, world_.shape).window(1, width + 1)
    elif kind == "ranges":
        ranges = [(start, start + 1 + row % width) for row, start in enumerate(starts)]
        window = device_ranges(tables, ranges, world_.shape)
    else:
        tables = world_.tables([0 for _ in starts])
        window = device_ranges(tables, [(0, start + 1) for start in starts], world_.shape)
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn((window.tokens, heads[0], DIM), generator=generator).to(DEVICE)
    attend = backend(world_.cache).begin(window)
    got = attend(0, queries, DIM**-0.5, world_.sinks if world_.needs.sinks else None)
    assert torch.allclose(got, world_.plain(window, queries), atol=1e-4)


# --------------------------------------------------------------------------- the trial at load


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PagedBackend", Kernels)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("mistake", ["a scale", "a position more", "another row"])
def test_an_attention_that_computes_something_else_is_refused(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Kernels.begin

    def wrong(self: Kernels, window: DevicePassLayout) -> Any:
        if mistake == "a position more":
            window.starts = window.starts + 1
        if mistake == "another row":
            window.starts = window.starts.flip(0)
        attend = begin(self, window)
        factor = 1.01 if mistake == "a scale" else 1.0
        return lambda layer, queries, scaling, *sinks: attend(
            layer, queries, scaling * factor, *sinks
        )

    world = World(0, 4, (2, 1), [9])
    assert paged_backend(world.cache).name == "paged"
    monkeypatch.setattr(Kernels, "begin", wrong)
    with pytest.raises(PairRefused, match="something else"):
        paged_backend(world.cache)


def test_a_device_that_runs_no_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0, 4, (2, 1), [9])

    def broken(self: Kernels, window: DevicePassLayout) -> Any:
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(attention.PagedBackend, "begin", broken)
    with pytest.raises(PairRefused, match=r"Triton runs no attention .* 0 active drivers"):
        paged_backend(world.cache)


def test_a_device_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0, 4, (2, 1), [9])
    monkeypatch.delattr(sys.modules["replicas.kernels"], "paged_attention")
    monkeypatch.setitem(sys.modules, "replicas.kernels.paged_attention", None)
    with pytest.raises(PairRefused, match="needs Triton"):
        paged_backend(world.cache)


def test_more_query_heads_than_the_kernels_have_room_for_are_refused() -> None:
    world = World(0, 4, (65, 1), [9])
    with pytest.raises(PairRefused, match=r"65 query heads share a KV head.* 64 at most"):
        paged_backend(world.cache)


@pytest.mark.long
@pytest.mark.usefixtures("_kernels")
def test_output_is_the_same_by_the_kernels() -> None:
    answered = (greedy_answers("qwen3")[4], sampled_answers("qwen3")[1])
    settings = {"num_gpu_blocks_override": 256, "graphs": "on", "plan_rows": 2, "plan_draft_len": 2}
    pair = replace(tiny_pair("qwen3"), context_len=64)
    replica = replica_of("half", answered, pair, **settings)
    check_answers(replica, answered, 2, 2)
