"""Proves that joined layers compute what the model's own forward computes, or are not used.

Models without norm weights, biases or rotation other than the default would hide a mistake in
them, so all of these are random here.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from replicas import batched, products
from replicas.fused import TOLERANCE
from replicas.model import ATTENTION, PagedModel
from replicas.paged_cache import PagedCache
from replicas.windows import CacheShape, Layout
from tests.tiny_pairs import ARCHITECTURES, VOCAB, target_model

CPU = torch.device("cpu")
SHAPE = CacheShape(block_size=4, context_len=256, dtype=torch.float32)
BLOCKS = 64


def uneven_model(architecture: str) -> PreTrainedModel:
    """A tiny model whose norms and biases are random, too."""
    if architecture == "qwen2":
        config = copy.deepcopy(target_model("qwen3").config).to_dict()
        kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        shape = {name: config[name] for name in (*kept, "num_key_value_heads", "vocab_size")}
        model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**shape))
    else:
        model = copy.deepcopy(target_model(architecture))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    model.set_attn_implementation(ATTENTION)
    return model.eval()


def paged(
    model: PreTrainedModel, fuse: bool, pack: bool = False, dtype: torch.dtype = torch.float32
) -> PagedModel:
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = PagedCache(
        config.num_hidden_layers,
        config.num_key_value_heads,
        dim,
        BLOCKS,
        SHAPE.block_size,
        dtype,
        CPU,
    )
    made = PagedModel(model, cache)
    made.try_out(dataclasses.replace(SHAPE, dtype=dtype), fuse, pack)
    return made


@torch.inference_mode()
def passes(model: PagedModel) -> list[torch.Tensor]:
    """Logits of a ragged prefill, a wide window and single tokens, far into the context."""
    generator = torch.Generator().manual_seed(2)
    table = torch.arange(1, 1 + 3 * 16).view(3, 16)
    logits = []
    for starts, width in (([0, 0, 0], 40), ([40, 37, 5], 5), ([45, 40, 8], 1), ([46, 41, 9], 2)):
        window = Layout(table, starts, width, SHAPE).window(0, width)
        tokens = torch.randint(VOCAB, (3, width), generator=generator)
        logits.append(model.forward(tokens, window))
    logits.append(model.forward(tokens, window, logits_to_keep=1))
    return logits


@pytest.fixture(params=["by torch", "batched"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by torch":
        monkeypatch.setattr(batched, "SCORES_MOST", 0)


def whole_blocks(positions: int) -> int:
    return -(-positions // SHAPE.block_size) * SHAPE.block_size


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen2"])
def test_joined_layers_compute_what_the_model_computes(
    architecture: str, pack: bool, attention: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights as they are, and in a CPU's own layout."""
    monkeypatch.setattr(products, "PACKED_LEAST", 1)
    model = uneven_model(architecture)
    plain, fused = paged(copy.deepcopy(model), fuse=False), paged(model, fuse=True, pack=pack)
    assert fused.fused
    assert not plain.fused
    for expected, got in zip(passes(plain), passes(fused), strict=True):
        assert got.shape == expected.shape
        difference = (got - expected).abs().max()
        assert difference <= TOLERANCE[torch.float32] * expected.abs().max()


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen2"])
@pytest.mark.parametrize("fuse", [False, True])
@torch.inference_mode()
def test_a_packed_window_gives_its_tokens_what_the_grid_gives_them(
    architecture: str, fuse: bool, attention: None
) -> None:
    """Rows of different width, in any order, their KV entries written like the others."""
    model = paged(uneven_model(architecture), fuse)
    assert model.fused == fuse
    assert model.packs
    generator = torch.Generator().manual_seed(3)
    table = torch.arange(1, 1 + 3 * 16).view(3, 16)
    tokens = torch.randint(VOCAB, (3, 40), generator=generator)
    model.forward(tokens, Layout(table, [0, 0, 0], 40, SHAPE).window(0, 40))
    fresh = torch.randint(VOCAB, (3, 4), generator=generator)
    window = Layout(table, [40, 31, 7], 4, SHAPE).window(0, 4)
    cells = torch.tensor([8, 0, 4, 1, 5, 2, 3])  # of widths 4, 2 and 1
    packed = model.forward(fresh.view(-1)[cells][None], window.packed(cells))
    after = Layout(table, [44, 33, 8], 1, SHAPE).window(0, 1)
    next_after_packed = model.forward(fresh[:, :1], after)
    grid = model.forward(fresh, window)
    next_after_grid = model.forward(fresh[:, :1], after)
    limit = TOLERANCE[torch.float32] * grid.abs().max()
    assert (packed[0] - grid.view(12, -1)[cells]).abs().max() <= limit
    assert (next_after_packed - next_after_grid).abs().max() <= limit


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen2"])
@torch.inference_mode()
def test_rows_that_read_in_parts_get_what_they_get_as_one(
    architecture: str, attention: None
) -> None:
    """All cells and some, a few positions and one; each part reads no further than its rows."""
    model = paged(uneven_model(architecture), fuse=True)
    read: list[int] = []
    gather = model._cache.gather
    runs_per_block = 2 * model._model.config.num_key_value_heads

    def noted(layer_idx: int, runs: torch.Tensor, out: torch.Tensor) -> None:
        gather(layer_idx, runs, out)
        read.append(runs.shape[0] // runs_per_block * SHAPE.block_size)

    model._cache.gather = noted  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(4)
    table = torch.arange(1, 1 + 4 * 15).view(4, 15)
    tokens = torch.randint(VOCAB, (4, 50), generator=generator)
    model.forward(tokens, Layout(table, [0] * 4, 50, SHAPE).window(0, 50))
    starts = [6, 9, 31, 50]
    for width in (4, 1):
        fresh = torch.randint(VOCAB, (4, width), generator=generator)
        whole = Layout(table, starts, width, SHAPE).window(0, width)
        divided = Layout(table, starts, width, SHAPE, parts=[2, 1, 1]).window(0, width)
        cells = torch.arange(4 * width).flip(0)[: 4 * width - 1]
        for packed in (False, True):
            passes = []
            for window in (whole, divided):
                read.clear()
                given = fresh.view(-1)[cells][None] if packed else fresh
                logits = model.forward(given, window.packed(cells) if packed else window)
                passes.append((logits, sum(read) / model._model.config.num_hidden_layers))
            (expected, of_whole), (got, of_parts) = passes
            limit = TOLERANCE[torch.float32] * expected.abs().max()
            assert (got - expected).abs().max() <= limit
            assert of_whole == 4 * whole_blocks(50 + width)
            assert of_parts == sum(whole_blocks(start + width) for start in (9, 9, 31, 50))


@pytest.mark.parametrize("starts", [(6, 9, 31, 50), (20, 20, 20, 20)])
@pytest.mark.parametrize("parts", [(), (2, 2)])
@torch.inference_mode()
def test_draft_passes_see_what_single_passes_see(
    starts: tuple[int, ...], parts: tuple[int, ...], attention: None
) -> None:
    """They read as far as the last of them does, and mask what lies beyond their own positions."""
    k = 3
    model = paged(uneven_model("llama"), fuse=True)
    generator = torch.Generator().manual_seed(5)
    table = torch.arange(1, 1 + 4 * 15).view(4, 15)
    filled = torch.randint(VOCAB, (4, 50), generator=generator)
    # What lies beyond a row's own positions is another row's leavings.
    model.forward(filled, Layout(table.flip(0), [0] * 4, 50, SHAPE).window(0, 50))
    model.forward(filled, Layout(table, [0] * 4, 50, SHAPE).window(0, 50))
    layout = Layout(table, list(starts), k + 2, SHAPE)
    windows = layout.draft_windows(k, parts)
    assert [window.width for window in windows] == [2, 1, 1]
    fresh = torch.randint(VOCAB, (4, k + 1), generator=generator)
    for j, window in enumerate(windows):
        begin = j + 1 if j else 0
        given = fresh[:, begin : j + 2]
        expected = model.forward(given, layout.window(begin, j + 2), logits_to_keep=1)
        got = model.forward(given, window, logits_to_keep=1)
        assert (got - expected).abs().max() <= TOLERANCE[torch.float32] * expected.abs().max()


def test_weights_are_joined_and_not_doubled() -> None:
    model = uneven_model("llama")
    assert paged(model, fuse=True).fused
    attention = model.model.layers[0].self_attn
    storages = {
        getattr(attention, name).weight.untyped_storage().data_ptr()
        for name in ("q_proj", "k_proj", "v_proj")
    }
    assert len(storages) == 1


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen2"])
def test_several_replicas_of_a_pair_share_joined_weights(architecture: str) -> None:
    model = uneven_model(architecture)
    joined = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}

    def storages() -> list[int]:
        return [
            parameter.untyped_storage().data_ptr()
            for name, parameter in model.named_parameters()
            if name.split(".")[-2] in joined
        ]

    apart = storages()
    first = paged(model, fuse=True)
    expected, once = passes(first), storages()
    assert len(set(once)) < len(set(apart))
    second = paged(model, fuse=True)
    assert storages() == once
    assert first.fused
    assert second.fused
    for replica in (first, second):
        assert all(map(torch.equal, passes(replica), expected))


def test_weights_that_only_lie_in_one_storage_are_joined_anew() -> None:
    """In another order, say, or with something between them."""
    model = uneven_model("llama")
    expected = passes(paged(copy.deepcopy(model), fuse=True))
    attention = model.model.layers[0].self_attn
    for batch in (("v_proj", "k_proj", "q_proj"), ("q_proj", "v_proj", "k_proj")):
        parts = [getattr(attention, name) for name in batch]
        whole = torch.cat([part.weight.detach() for part in parts])
        for part, weight in zip(parts, whole.split([p.out_features for p in parts]), strict=True):
            part.weight = nn.Parameter(weight, requires_grad=False)
        assert all(map(torch.equal, passes(paged(model, fuse=True)), expected))


def _another_activation(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.forward = lambda x: x * 0.5


def _a_part_more(model: PreTrainedModel) -> None:
    model.model.layers[2].self_attn.sinks = nn.Linear(2, 2)


def _a_hook(model: PreTrainedModel) -> None:
    model.model.norm.register_forward_hook(lambda module, inputs, out: out * 2)


def _scaled_logits(model: PreTrainedModel) -> None:
    plain = model.forward

    def forward(*args, **kwargs):  # type: ignore[no-untyped-def]
        out = plain(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    model.forward = forward


def _another_norm(model: PreTrainedModel) -> None:
    class OffsetRMSNorm(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x * 0.01

    model.model.norm.__class__ = OffsetRMSNorm


def _another_projection(model: PreTrainedModel) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model.model.layers[0].self_attn.o_proj.__class__ = Doubled


def _another_output_layer(model: PreTrainedModel) -> None:
    model.lm_head = nn.Sequential(model.lm_head, nn.Tanh())


@pytest.mark.parametrize(
    "change",
    [
        _another_projection,
        _another_output_layer,
        _another_activation,
        _a_part_more,
        _a_hook,
        _scaled_logits,
        _another_norm,
    ],
)
def test_a_model_that_computes_something_else_keeps_its_own_forward(change) -> None:  # type: ignore[no-untyped-def]
    model = uneven_model("llama")
    change(model)
    plain, fused = paged(copy.deepcopy(model), fuse=False), paged(model, fuse=True)
    assert not fused.fused
    for expected, got in zip(passes(plain), passes(fused), strict=True):
        assert torch.equal(expected, got)
