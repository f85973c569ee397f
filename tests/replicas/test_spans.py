"""Proves that a pass over spans writes the KV entries that each row gets by itself, and no other.

Entries are compared over the whole cache, so that a token in a wrong place shows in two of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replicas.fused import TOLERANCE
from replicas.model import PagedModel
from replicas.prefill import prefill
from replicas.spans import Span, cut_up, round_tokens, spans_window
from replicas.windows import SCRAP_BLOCK, Layout, Window
from tests.replicas.test_fused import SHAPE, paged, uneven_model
from tests.tiny_pairs import ARCHITECTURES, VOCAB

SPANS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted).map(tuple), min_size=1, max_size=8
)
MODELS = [*ARCHITECTURES, "qwen2"]
# Rows begin anew and go on, alone and in equal pairs, at block bounds and within; one has nothing.
RAGGED = [(0, 9), (7, 40), (0, 1), (8, 9), (0, 9), (4, 12), (4, 12), (21, 21)]
CHUNKS = [1, 2, 5, 512]


@contextmanager
def uninitialized_is_nan() -> Iterator[None]:
    """Fresh memory holds no numbers: torch fills it so where it is to be deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def contents_of(spans: Sequence[Span]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    most = max(end for _, end in spans) + 1
    fresh = torch.randint(VOCAB, (len(spans), most), generator=generator)
    contents: list[list[int]] = fresh.tolist()
    return contents


def table_of(spans: Sequence[Span]) -> torch.Tensor:
    """As many blocks as each row needs, in no batch; those of shorter rows are padded."""
    counts = [-(-end // SHAPE.block_size) for _, end in spans]
    generator = torch.Generator().manual_seed(5)
    blocks = 1 + torch.randperm(sum(counts), generator=generator)
    table = torch.full((len(spans), max(counts)), SCRAP_BLOCK)
    for row, (count, own) in enumerate(zip(counts, blocks.split(counts), strict=True)):
        table[row, :count] = own
    return table


def entries(model: PagedModel) -> torch.Tensor:  # [layers, blocks, block_size, 2, heads, dim]
    """All that is stored but for the scrap block."""
    return torch.stack(model._cache._layers)[:, 1:].clone()


@torch.inference_mode()
def fill_alone(model: PagedModel, content: list[int], span: Span, row: torch.Tensor) -> None:
    """One row of the table, [1, blocks], in one pass of the whole forward."""
    begin, end = span
    if begin < end:
        window = Layout(row, [begin], end - begin, SHAPE).window(0, end - begin)
        model.forward(torch.tensor([content[begin:end]]), window)


def begun(model: PagedModel, spans: Sequence[Span], table: torch.Tensor) -> torch.Tensor:
    """What is stored where all that lies before the spans is filled, and nothing else."""
    model.clear()
    for row, (begin, _) in enumerate(spans):
        fill_alone(model, contents_of(spans)[row], (0, begin), table[row : row + 1])
    return entries(model)


def assert_filled_as_alone(
    model: PagedModel, alone: PagedModel, spans: Sequence[Span], table: torch.Tensor, chunk: int
) -> None:
    contents = contents_of(spans)
    before = begun(alone, spans, table)
    for row, span in enumerate(spans):
        fill_alone(alone, contents[row], span, table[row : row + 1])
    expected = entries(alone)
    begun(model, spans, table)
    with torch.inference_mode():
        prefill([model], contents, spans, table, SHAPE, chunk)
    got = entries(model)
    assert not torch.equal(expected, before) or all(begin == end for begin, end in spans)
    assert (got - expected).abs().max() <= TOLERANCE[torch.float32] * expected.abs().max()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("architecture", MODELS)
def test_ragged_rows_get_what_each_gets_alone(architecture: str, chunk: int) -> None:
    model = uneven_model(architecture)
    plain, fused = paged(copy.deepcopy(model), fuse=False), paged(model, fuse=True)
    assert fused.in_parts
    assert not plain.in_parts
    assert_filled_as_alone(fused, plain, RAGGED, table_of(RAGGED), chunk)


@pytest.mark.parametrize("span", [(0, 1), (0, 37), (12, 13), (5, 37)])
def test_one_row_gets_what_it_gets_alone(span: Span) -> None:
    model = uneven_model("llama")
    plain, fused = paged(copy.deepcopy(model), fuse=False), paged(model, fuse=True)
    assert_filled_as_alone(fused, plain, [span], table_of([span]), 512)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_differ_by_rounding_only(dtype: torch.dtype) -> None:
    model = uneven_model("qwen3").to(dtype)
    fused = paged(model, fuse=True, dtype=dtype)
    assert fused.in_parts
    contents, table = contents_of(RAGGED), table_of(RAGGED)
    shape = SHAPE.__class__(SHAPE.block_size, SHAPE.context_len, dtype)
    stored = []
    for chunk in (512, 3):
        fused.clear()
        with torch.inference_mode():
            prefill([fused], contents, [(0, b) for b, _ in RAGGED], table, shape, chunk)
            prefill([fused], contents, RAGGED, table, shape, chunk)
        stored.append(entries(fused))
    assert (stored[0] - stored[1]).abs().max() <= TOLERANCE[dtype] * stored[0].abs().max()


def test_a_shared_prefix_is_read_and_not_written() -> None:
    """Two rows behind the same blocks, which one of them filled."""
    model = uneven_model("glm4")
    plain, fused = paged(copy.deepcopy(model), fuse=False), paged(model, fuse=True)
    spans = [(0, 8), (8, 19), (8, 13)]
    contents = contents_of(spans)
    contents[1][:8] = contents[2][:8] = contents[0][:8]
    table = table_of(spans)
    table[1:, :2] = table[0, :2]
    for row, span in enumerate(spans):
        fill_alone(plain, contents[row], span, table[row : row + 1])
    fill_alone(fused, contents[0], spans[0], table[:1])
    shared = entries(fused)[:, table[0, :2] - 1]
    with torch.inference_mode():
        prefill([fused], contents[1:], spans[1:], table[1:], SHAPE, 512)
    assert torch.equal(entries(fused)[:, table[0, :2] - 1], shared)
    expected = entries(plain)
    difference = (entries(fused) - expected).abs().max()
    assert difference <= TOLERANCE[torch.float32] * expected.abs().max()


def test_each_model_is_filled_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that joins no layers gets rows padded to one width, the other the tokens there are; a
    pass holds no more of them than memory was planned for."""
    model = uneven_model("llama")
    plain, fused = paged(copy.deepcopy(model), fuse=False), paged(model, fuse=True)
    seen: dict[str, list[torch.Size]] = {"plain": [], "fused": []}
    for name, one in (("plain", plain), ("fused", fused)):
        fill = one.fill

        def noting(
            tokens: torch.Tensor, window: Window, name: str = name, fill: object = fill
        ) -> None:
            seen[name].append(tokens.shape)
            assert callable(fill)
            fill(tokens, window)

        monkeypatch.setattr(one, "fill", noting)
    spans: list[Span] = [(0, 20), (0, 4), (0, 11)]
    with torch.inference_mode():
        prefill([plain, fused], contents_of(spans), spans, table_of(spans), SHAPE, 6)
    assert seen["fused"] == [(1, 18), (1, 18)]
    assert sum(rows * width for rows, width in seen["plain"]) > 35
    difference = (entries(fused) - entries(plain)).abs().max()
    assert difference <= TOLERANCE[torch.float32] * entries(plain).abs().max()


@pytest.mark.parametrize("architecture", MODELS)
@torch.inference_mode()
def test_to_fill_computes_the_entries_of_a_whole_forward_to_the_bit(architecture: str) -> None:
    """It leaves out only what no entry depends on."""
    model = paged(uneven_model(architecture), fuse=True)
    spans: list[Span] = [(0, 9), (0, 9), (0, 30), (0, 2)]
    window = spans_window(table_of(spans), spans, SHAPE, 50)
    tokens = torch.tensor([[token for row in contents_of(spans)[:1] for token in (row + row)[:50]]])
    model.forward(tokens, window)
    expected = entries(model)
    model.clear()
    model.fill(tokens, window)
    assert torch.equal(entries(model), expected)


@given(SPANS, st.integers(1, 70))
def test_passes_hold_every_token_once_in_order_and_are_full(spans: list[Span], most: int) -> None:
    passes = list(cut_up(spans, most))
    sizes = [sum(end - begin for _, (begin, end) in one) for one in passes]
    assert all(size == most for size in sizes[:-1])
    assert all(0 < size <= most for size in sizes[-1:])
    assert all(len({row for row, _ in one}) == len(one) for one in passes)
    reached = [begin for begin, _ in spans]
    for row, (begin, end) in (piece for one in passes for piece in one):
        assert begin == reached[row] < end
        reached[row] = end
    assert reached == [end for _, end in spans]


@given(st.integers(1, 1 << 14))
def test_numbers_of_tokens_are_few_and_little_larger(tokens: int) -> None:
    rounded = round_tokens(tokens)
    assert tokens <= rounded <= tokens + max(15, tokens // 16)
    assert round_tokens(rounded) == rounded
    assert len({round_tokens(one) for one in range(1, 4097)}) <= 100


@torch.inference_mode()
def test_what_makes_up_a_round_number_stays_finite_and_out_of_every_row() -> None:
    """Also where memory that a pass finds holds no numbers."""
    model = paged(uneven_model("qwen3"), fuse=True)
    spans: list[Span] = [(0, 9), (0, 30)]
    table = table_of(spans)
    tokens = torch.tensor([[token for row in contents_of(spans) for token in row[:30]]])
    stored = []
    for number in (39, 60):
        model.clear()
        with uninitialized_is_nan():
            model.fill(tokens[:, :number], spans_window(table, spans, SHAPE, number))
        stored.append(entries(model))
        assert all(layer.isfinite().all() for layer in model._cache._layers)
    assert (stored[0] - stored[1]).abs().max() <= TOLERANCE[torch.float32] * stored[0].abs().max()


def test_equal_spans_are_read_together() -> None:
    spans: list[Span] = [(0, 9), (4, 12), (0, 9), (4, 12), (0, 3)]
    (one,) = cut_up(spans, 100)
    rows = [row for row, _ in one]
    window = spans_window(table_of(spans)[rows], [span for _, span in one], SHAPE, 37)
    assert [(part.rows, part.width, part.length, part.first) for part in window.parts] == [
        (1, 3, 3, True),
        (2, 9, 9, True),
        (2, 8, 12, False),
    ]
