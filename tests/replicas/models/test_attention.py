"""Proves that every attention over a paged cache sees what a plain one sees, whatever lies where,
and that one is taken only if it does and is faster.

FlexAttention runs unfused on a CPU. Varlen attention has no CPU kernel: a plain one with the
meaning that torch documents stands for it, so the arguments are what is tested.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from replicas.config import ReplicaConfig
from replicas.invariant.device import chunked_attention, efficient_attention
from replicas.kv_cache import SCRAP_BLOCK, CacheShape, PagedCache
from replicas.kv_cache.device_layout import DeviceLayout, DeviceWindow, device_ranges
from replicas.models.attention import (
    AttentionRefused,
    FlexAttention,
    GatherBackend,
    NotPaged,
    PagedBackend,
    VarlenAttention,
    choose_attention,
    fused_attention,
)
from replicas.models.attention.choice import fastest
from replicas.models.build import build
from replicas.models.paged_model import AttentionBackend, PagedModel
from tests.oracle.worlds import check_answers, greedy_answers, sampled_answers
from tests.replicas.built import BLOCK_SIZE, BLOCKS, CONTEXT, uneven_model
from tests.tiny_pairs import tiny_replica

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DIM = 8


def plain_varlen(
    query: torch.Tensor,  # [tokens, heads, dim]
    key: torch.Tensor,  # [blocks, block_size, kv_heads, dim]
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int | None = None,
) -> torch.Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` computes, one sequence after the other."""
    assert {x.dtype for x in (cu_seq_q, cu_seq_k, seqused_k, block_table)} == {torch.int32}
    assert window_size == (-1, 0), "causal, aligned at the end"
    assert num_splits == 1
    assert enable_gqa or query.shape[1] == key.shape[2]
    out = torch.zeros_like(query)
    for row in range(len(cu_seq_q) - 1):
        begin, end = cu_seq_q[row : row + 2].tolist()
        used = int(seqused_k[row])
        assert end - begin <= max_q
        assert used <= max_k <= cu_seq_k[row + 1] - cu_seq_k[row]
        own = block_table[row].long()
        group = query.shape[1] // key.shape[2]
        keys, values = (
            x[own].flatten(0, 1)[:used].repeat_interleave(group, dim=1) for x in (key, value)
        )
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], keys)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        last = torch.arange(end - begin)[:, None] + used - (end - begin)
        scores = scores.masked_fill(torch.arange(used) > last, -torch.inf)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


@pytest.fixture(scope="module", autouse=True)
def _varlen_on_a_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen)
        yield


class World:
    """One layer's cache with random contents, and rows whose blocks are drawn at random."""

    def __init__(
        self, seed: int, block_size: int, heads: tuple[int, int], lengths: list[int]
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads = heads
        self.shape = CacheShape(block_size, 96, self.heads, self.kv_heads, DIM)
        blocks = 180
        self.cache = PagedCache(1, self.kv_heads, DIM, blocks, block_size, torch.float32, CPU)
        (layer,) = self.cache.layers
        layer.copy_(torch.randn(layer.shape, generator=generator))
        layer[SCRAP_BLOCK] = 1e4  # whatever attends there is found out
        rng = random.Random(seed)
        free = rng.sample(range(1, blocks + 1), blocks)
        owned = [-(-length // block_size) + rng.randrange(3) for length in lengths]  # some ahead
        tables = [[free.pop() for _ in range(count)] for count in owned]
        width = max(map(len, tables))
        self.table = torch.tensor([t + [SCRAP_BLOCK] * (width - len(t)) for t in tables])

    def backend(self, name: str) -> AttentionBackend:
        if name == "flex":
            flex = FlexAttention(self.cache.blocks, self.shape.block_size, 96, CPU)
            return PagedBackend(self.cache, self.shape, flex)
        if name == "varlen":
            varlen = VarlenAttention(torch.bfloat16, GPU)
            return PagedBackend(self.cache, self.shape, varlen)
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
                seen = kv[: int(window.starts[row]) + column + 1]
                keys, values = seen.repeat_interleave(self.heads // self.kv_heads, 2).unbind(1)
                scores = torch.einsum("hd,khd->hk", grid[row, column], keys) * DIM**-0.5
                out[row, column] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
        return window.pack(out).flatten(1)


@pytest.mark.parametrize("name", ["gather", "flex", "varlen", "chunked"])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 999),
    block_size=st.sampled_from([1, 3, 4, 16]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]),
    starts=st.lists(st.integers(0, 30), min_size=1, max_size=4),
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
    queries = torch.randn((window.tokens, heads[0], DIM), generator=generator)
    attention = world_.backend(name).begin(window, heads[0])
    got = attention(0, queries, DIM**-0.5)
    assert torch.allclose(got, world_.plain(window, queries), atol=1e-4)


def test_efficient_attention_pads_to_whole_chunks_and_sees_the_same() -> None:
    """On a CPU torch takes another kernel for it: the arguments are what is tested."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn((2, 4, n, 8), generator=generator) for n in (3, 40, 40))
    mask = torch.zeros(2, 1, 3, 40)
    mask[1, :, :, 20:] = -torch.inf
    expected = fused_attention(query, key, value, mask, 0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replicas.invariant.device.sdpa_kernel", lambda *_: torch.no_grad())
        got = efficient_attention(query, key, value, mask, 0.3)
    assert torch.allclose(got, expected, atol=1e-5)


# --------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"gather": [2.0, 2.0]}, "gather"),
        ({"gather": [2.0, 2.0], "flex": [1.0, 1.0]}, "flex"),
        ({"gather": [2.0, 2.0], "flex": [3.0, 3.0]}, "gather"),
        ({"gather": [2.0, 2.0], "flex": [1.5, 1.5], "varlen": [1.0, 1.0]}, "varlen"),
        # A pass counts as its share of gathering's: the long one alone does not decide.
        ({"gather": [1.0, 100.0], "flex": [4.0, 50.0]}, "gather"),
        ({"gather": [1.0, 1.0], "flex": [0.98, 0.98]}, "gather"),  # within the noise
    ],
)
def test_the_fastest_is_taken_if_it_is_faster_than_gathering(
    times: dict[str, Sequence[float]], expected: str
) -> None:
    assert fastest(times) == expected
    assert fastest(dict(reversed(times.items()))) == expected


def on_device() -> tuple[PagedModel, CacheShape]:
    """A model as on a GPU: device layouts, gathering."""
    model = uneven_model("llama")
    config = ReplicaConfig(block_size=BLOCK_SIZE, device="cpu", graphs="on")
    paged, _ = build(model, "tiny", config, BLOCKS, CONTEXT, False)
    assert isinstance(paged.backend, GatherBackend)
    return paged, paged.backend.shape


@pytest.mark.parametrize("mistake", ["a scale", "a position more", "another row"])
def test_an_attention_that_computes_something_else_is_refused_or_left_out(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = FlexAttention.enter

    def wrong(self: FlexAttention, window: DeviceWindow) -> Any:
        if mistake == "a position more":
            window.starts = window.starts + 1
        if mistake == "another row":
            window.starts = window.starts.flip(0)
        attend = enter(self, window)
        factor = 1.01 if mistake == "a scale" else 1.0
        return lambda query, keys, values, scaling: attend(query, keys, values, scaling * factor)

    monkeypatch.setattr(FlexAttention, "enter", wrong)
    paged, shape = on_device()
    gather = paged.backend
    with pytest.raises(AttentionRefused, match="flex"):
        choose_attention(paged, "flex", shape, 4)
    choose_attention(paged, "auto", shape, 4)
    assert paged.backend is gather


def test_what_does_not_fit_is_refused_by_name_and_left_out_by_auto() -> None:
    paged, shape = on_device()
    with pytest.raises(AttentionRefused, match="needs a GPU"):
        choose_attention(paged, "varlen", shape, 4)
    with pytest.raises(NotPaged, match="powers of two"):
        FlexAttention(8, 3, 96, GPU)


@pytest.mark.parametrize(("architecture", "graphs"), [("llama", "off"), ("qwen3", "on")])
def test_output_is_the_same_by_paged_attention(architecture: str, graphs: str) -> None:
    replica = tiny_replica(architecture, attention="flex", graphs=graphs, plan_rows=5)
    assert replica.spec.attention == "flex"
    assert replica.spec.reads_apart
    for answered in (greedy_answers(architecture), sampled_answers(architecture)):
        check_answers(replica, answered, 5, 3)
