"""Proves that attention in place sees exactly what gathering sees, whatever lies where.

FlexAttention runs unfused on the CPU. Varlen attention has no CPU kernel: a plain one with the
meaning that torch documents stands for it, so the arguments are what is tested.
"""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.varlen import varlen_attn

from replicas.in_place import FlexInPlace, InPlace, NotInPlace, VarlenInPlace, logical_blocks
from replicas.model import paged_attention
from replicas.paged_cache import PagedCache
from replicas.windows import SCRAP_BLOCK, CacheShape, Layout, Window

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DIM = 8
BLOCKS = 180
CONTEXT = 96


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
def _varlen_on_a_cpu() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen)
        yield


def made(kind: str, block_size: int) -> InPlace:
    if kind == "flex":
        return FlexInPlace(BLOCKS, block_size, CONTEXT, CPU)
    return VarlenInPlace(torch.bfloat16, GPU)


class World:
    """One layer's cache with random contents, and rows whose blocks are drawn at random."""

    def __init__(self, seed: int, block_size: int, kv_heads: int, lengths: list[int]) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.shape = CacheShape(block_size, CONTEXT, torch.float32)
        self.cache = PagedCache(1, kv_heads, DIM, BLOCKS, block_size, torch.float32, CPU)
        (layer,) = self.cache._layers
        layer.copy_(torch.randn(layer.shape, generator=self._generator))
        layer[SCRAP_BLOCK] = 1e4  # who looks there is found out
        rng = random.Random(seed)
        free = rng.sample(range(1, BLOCKS + 1), BLOCKS)
        owned = [-(-length // block_size) + rng.randrange(3) for length in lengths]  # some ahead
        tables = [[free.pop() for _ in range(blocks)] for blocks in owned]
        width = max(map(len, tables))
        self.table = torch.tensor([t + [SCRAP_BLOCK] * (width - len(t)) for t in tables])

    def window(self, starts: list[int], width: int) -> Window:
        return Layout(self.table, starts, width, self.shape).window(0, width)

    def both(
        self, kind: str | InPlace, window: Window, group: int, scaling: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In place and gathered, each [rows, width, heads, head_dim]."""
        kv_heads = self.cache._layers[0].shape[3]
        shape = (window.rows, window.width, kv_heads * group, DIM)
        query = torch.randn(shape, generator=self._generator).transpose(1, 2)
        module = torch.nn.Identity()
        self.cache.enter(window)
        keys, values = self.cache.read(0)
        expected, _ = paged_attention(module, query, keys, values, window.mask, scaling)
        in_place = made(kind, self.cache.block_size) if isinstance(kind, str) else kind
        self.cache.enter(window, in_place=True)
        keys, values = self.cache.read(0)
        assert keys.untyped_storage().data_ptr() == self.cache._layers[0].data_ptr(), "no copy"
        got, _ = paged_attention(
            module, query, keys, values, window.mask, scaling, in_place.enter(window)
        )
        return got, expected


@pytest.mark.parametrize("kind", ["flex", "varlen"])
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    block_size=st.sampled_from([1, 3, 4, 16]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 3)]),
    starts=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    width=st.sampled_from([1, 2, 5, 9]),
)
def test_rows_of_any_lengths_get_what_gathering_gives(
    kind: str,
    seed: int,
    block_size: int,
    heads: tuple[int, int],
    starts: list[int],
    width: int,
) -> None:
    world = World(seed, block_size, heads[0], [start + width for start in starts])
    got, expected = world.both(kind, world.window(starts, width), heads[1])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["flex", "varlen"])
def test_rows_of_one_length_need_no_mask(kind: str) -> None:
    world = World(1, 4, 2, [18] * 3)
    window = world.window([17] * 3, 1)
    assert window.mask is None
    got, expected = world.both(kind, window, 2, scaling=0.7)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["flex", "varlen"])
def test_a_block_that_rows_share_is_read_by_each(kind: str) -> None:
    world = World(2, 4, 2, [21, 17, 9])
    world.table[1:, :2] = world.table[0, :2]
    got, expected = world.both(kind, world.window([18, 14, 8], 3), 2)
    torch.testing.assert_close(got[:2], expected[:2], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["flex", "varlen"])
def test_padding_stays_finite_and_disturbs_no_row(kind: str) -> None:
    """A window that begins before a row's first position, one that ends beyond a row's blocks, and
    a row that lies in the scrap block altogether."""
    world = World(3, 4, 2, [3, 30, 12, 1])
    world.table[3] = SCRAP_BLOCK
    world.cache._layers[0][SCRAP_BLOCK] = 2.0
    got, expected = world.both(kind, world.window([-1, 25, 10, 0], 5), 2)
    assert got.isfinite().all()
    assert got[0, 0].eq(0).all(), "nothing to see"
    for row, columns in ((0, slice(1, 4)), (1, slice(0, 5)), (2, slice(0, 2))):
        torch.testing.assert_close(got[row, columns], expected[row, columns], rtol=1e-5, atol=2e-6)


def test_a_step_is_compiled_once_per_shape_whatever_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, but that what torch traced runs by plain operations: no break, no compilation
    for other lengths, tables or steps of another draft length, and no end of shapes."""
    compiled = []

    def plainly(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile_(f, backend=plainly, **how))
    in_place = FlexInPlace(BLOCKS, 16, CONTEXT, GPU)
    monkeypatch.undo()
    rng = random.Random(5)
    with torch.inference_mode():
        for rows in range(1, 6):
            for width in (1, 4):
                for draft_len in (4, 6):
                    starts = [rng.randrange(60) for _ in range(rows)]
                    world = World(rows, 16, 2, [start + 8 for start in starts])
                    layout = Layout(world.table, starts, draft_len + 2, world.shape)
                    got, expected = world.both(in_place, layout.window(1, 1 + width), 2)
                    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)
                assert len(compiled) == 2 * (rows - 1) + (1 if width == 1 else 2)


def test_the_inverse_of_a_table_names_each_owned_block_once() -> None:
    table = torch.tensor([[7, 2, 5], [3, SCRAP_BLOCK, SCRAP_BLOCK]])
    assert logical_blocks(table, 7).tolist() == [
        [-1, -1, 1, -1, -1, 2, -1, 0],
        [-1, -1, -1, 0, -1, -1, -1, -1],
    ]


@pytest.mark.parametrize("block_size", [8, 24])
def test_a_block_that_a_gpu_cannot_multiply_is_refused(block_size: int) -> None:
    with pytest.raises(NotInPlace, match="powers of two from 16"):
        FlexInPlace(BLOCKS, block_size, CONTEXT, GPU)


def test_torchs_own_function_takes_the_same_arguments() -> None:
    theirs = inspect.signature(varlen_attn).parameters
    if "block_table" not in theirs:
        pytest.skip("this torch's varlen attention takes no block table")
    ours = inspect.signature(plain_varlen).parameters
    positional = [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert list(theirs)[: len(positional)] == positional
    assert all(theirs[name].kind is one.kind for name, one in ours.items())


def test_varlen_is_refused_where_torch_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotInPlace, match="needs a GPU"):
        VarlenInPlace(torch.bfloat16, CPU)
    with pytest.raises(NotInPlace, match="float16 or bfloat16"):
        VarlenInPlace(torch.float32, GPU)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query: query)
    with pytest.raises(NotInPlace, match="no block table"):
        VarlenInPlace(torch.bfloat16, GPU)
