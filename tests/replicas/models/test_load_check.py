"""Proves: no model is served whose rows get something else beside others than alone.

A fault is planted where the product computes; each must be found, and without it the same model is
served. The bits of a row do not depend on what is computed beside it, in any form of attention.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from replicas.errors import PairRefused
from replicas.invariant import host_attention
from replicas.invariant.layout import RowGroup
from replicas.kv_cache import LayerShape
from replicas.models import paged_model
from replicas.models.own_code.experts import ExpertProducts
from replicas.models.own_code.layer_reading import layers_of
from tests.replicas.built import Rows, built
from tests.replicas.families import FAMILIES, WINDOW, family_model

Plant = Callable[[pytest.MonkeyPatch], None]


def _blocks(change: Callable[[Any], Any]) -> Plant:
    """Another table of blocks than the pass has."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        begin = host_attention.HostBackend.begin

        def wrong(self: Any, layout: Any) -> Any:
            for group in layout.groups:
                group.blocks = change(group.blocks)
            return begin(self, layout)

        monkeypatch.setattr(host_attention.HostBackend, "begin", wrong)

    return plant


def _neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over all tokens of a pass, as some models' own code has it."""

    def wrong(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        scaling = more.get("scaling")
        tokens = query.shape[2]
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=tokens > 1, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    monkeypatch.setitem(
        paged_model.AttentionInterface._global_mapping, paged_model.ATTENTION, wrong
    )


def _window(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_in = RowGroup.hidden_in

    def wrong(self: RowGroup, needs: LayerShape) -> Any:
        from dataclasses import replace

        longer = needs.window and replace(needs, window=needs.window + 1)
        return hidden_in(self, longer or needs)

    monkeypatch.setattr(RowGroup, "hidden_in", wrong)


def _left_out(place: int) -> Plant:
    """The cap (2) or the sinks (3) of attention."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        attend = host_attention.attend

        def wrong(*arguments: Any) -> None:
            kept = [*arguments]
            if place == 3 and kept[3] is not None:
                kept[3] = torch.full_like(kept[3], -torch.inf)
            elif place == 2:
                kept[2] = None
            attend(*kept)

        monkeypatch.setattr(host_attention, "attend", wrong)

    return plant


def _experts(monkeypatch: pytest.MonkeyPatch) -> None:
    of = ExpertProducts.of.__func__  # type: ignore[attr-defined]

    def wrong(cls: Any, *arguments: Any) -> ExpertProducts:
        products: ExpertProducts = of(cls, *arguments)
        products.down[0], products.down[1] = products.down[1], products.down[0]
        return products

    monkeypatch.setattr(ExpertProducts, "of", classmethod(wrong))


FAULTS: list[tuple[str, str, Plant]] = [
    ("a row sees its neighbour's tokens", "mistral", _neighbour),
    ("a row reads its neighbour's blocks", "llama", _blocks(lambda blocks: np.roll(blocks, 1, 0))),
    (
        "blocks in order only",
        "llama",
        _blocks(lambda blocks: blocks[:, :1] + np.arange(blocks.shape[1])),
    ),
    ("a window off by one", "gemma3_text", _window),
    ("a cap left out", "gemma2", _left_out(2)),
    ("sinks left out", "gpt_oss", _left_out(3)),
    ("an expert's weight of another rank", "qwen3_moe", _experts),
]


@pytest.mark.parametrize(("kind", "plant"), [(kind, plant) for _, kind, plant in FAULTS])
def test_a_planted_fault_is_found(kind: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(PairRefused, match=r"is not served: .* than for a request alone"):
        built(family_model(kind), prepack=False)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_rows_bits_depend_on_nothing_beside_it(kind: str) -> None:
    """Rows of many lengths, windows and ragged ranges of them, against one prefill of all."""
    paged, how = built(family_model(kind))
    assert paged.arithmetic.proven, how
    rows, rng = Rows(paged, (3, 17, 40, 90, 33, 21, 8, 60)), random.Random(0)
    passes = [rows.random_pass(rng) for _ in range(40)]
    assert sum(computed for computed, _ in passes) > 1000
    assert sum(differing for _, differing in passes) == 0


EXPECTED = {
    "llama": {LayerShape(4, 2, 16, 16)},
    "mistral": {LayerShape(4, 2, 16, 16, window=WINDOW)},
    "gemma2": {
        LayerShape(4, 2, 16, 16, window=WINDOW, soft_cap=2.0),
        LayerShape(4, 2, 16, 16, soft_cap=2.0),
    },
    "gpt_oss": {
        LayerShape(4, 2, 16, 16, window=WINDOW, sinks=True),
        LayerShape(4, 2, 16, 16, sinks=True),
    },
    "deepseek_v3": {LayerShape(4, 4, 24, 8)},
    "llama4_text": {LayerShape(4, 2, 16, 16, chunk=WINDOW), LayerShape(4, 2, 16, 16)},
    "gemma4_text": {LayerShape(4, 2, 16, 16, window=WINDOW), LayerShape(4, 2, 32, 32)},
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_what_a_layer_needs_is_read_from_the_models_own_code(kind: str) -> None:
    from dataclasses import replace

    layers = layers_of(family_model(kind))
    assert {replace(layer, store=0) for layer in layers} == EXPECTED[kind]
    shared = kind == "gemma4_text"  # its last two layers read what the first two have stored
    assert [layer.store for layer in layers] == ([0, 1, 0, 1] if shared else [0, 1])


def test_a_model_that_is_built_twice_computes_the_same_twice() -> None:
    """Two replicas of one process may share it."""
    model, tokens = family_model("gpt_oss"), torch.arange(3, 40)
    said = []
    for _ in range(2):
        paged, how = built(model)
        assert paged.arithmetic.proven, how
        layout = paged.backend.ranges_layout(torch.arange(1, 11)[None], [(0, 37)])
        with torch.inference_mode():
            said.append(paged.forward(tokens, layout).logits)
    assert torch.equal(said[0], said[1])
