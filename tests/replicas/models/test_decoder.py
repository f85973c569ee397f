"""Proves that joined layers compute what the model's own forward computes, or are not used.

Models without norm weights, biases or rotation other than the default would hide a mistake in
them, so all of these are random here.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from replicas.config import ReplicaConfig
from replicas.kv_cache import CacheShape, PagedCache
from replicas.models import decoder
from replicas.models.build import build_model, trial_logits
from replicas.models.paged_model import ERROR_FLOOR
from replicas.models.reference import own_logits
from tests.replicas.built import Rows, built, uneven_model
from tests.tiny_pairs import ARCHITECTURES, DEVICE

LENGTHS = (3, 40, 97, 200)


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen2"])
def test_logits_over_the_paged_cache_are_the_models_own(architecture: str, join: bool) -> None:
    model = uneven_model(architecture)
    plain = copy.deepcopy(model)
    paged, how = built(model, join)
    assert (paged.decoder is not None) == join, how
    rows = Rows(paged, LENGTHS)
    for tokens, length, logits in zip(rows.tokens, LENGTHS, rows.logits, strict=True):
        truth = own_logits(plain, tokens[:length], torch.float64)
        assert error(logits, truth) <= ERROR_FLOOR[torch.float32]
        assert error(own_logits(plain, tokens[:length]), truth) <= ERROR_FLOOR[torch.float32]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_gpus_kernels_compute_what_the_operations_do(architecture: str) -> None:
    """On a CPU Triton interprets them. Qwen3 has norms of heads."""
    layers = pytest.importorskip("replicas.kernels.layers")
    config = ReplicaConfig(block_size=4, device=DEVICE, graphs="on")
    with torch.inference_mode():
        model = uneven_model(architecture).to(DEVICE)
        paged, _ = build_model(model, "tiny", config, 20, 64, False)
        assert paged.decoder is not None
        paged.decoder.kernels = None
        paged.cache.clear()
        expected = trial_logits(paged)
        keys = [layer.clone() for layer in paged.cache.layers]
        paged.decoder.kernels = layers
        paged.cache.clear()
        got = trial_logits(paged)
    assert error(got, expected) <= ERROR_FLOOR[torch.float32]
    for stored, other in zip(keys, paged.cache.layers, strict=True):
        assert other.abs().max() > 0
        assert torch.allclose(stored[1:], other[1:], atol=1e-5)


def test_they_write_only_numbers_into_a_cache_in_float16() -> None:
    layers = pytest.importorskip("replicas.kernels.layers")
    device = torch.device(DEVICE)
    cache = PagedCache(CacheShape(4, 16, 4, 2, 8), 1, 3, torch.float16, device)
    qkv = torch.ones(2, 8, 8, dtype=torch.float16, device=device)
    qkv[0, 5, 3], qkv[1, 7, 0], qkv[1, 6, 6] = torch.nan, torch.inf, -torch.inf
    places = torch.tensor([4, 9], device=device)
    table = torch.ones(16, 2, 8, dtype=torch.float16, device=device)
    layers.rotate_and_write(qkv, cache, 0, places, places, table, None)
    (layer,) = cache.layers
    assert layer.isfinite().all()
    assert layer.flatten(0, 1)[places].count_nonzero() == 2 * 2 * 2 * 8 - 2  # NaN spoils two


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen2"])
def test_joined_weights_take_the_place_of_their_parts(architecture: str) -> None:
    """None is in memory twice; a second replica of the pair joins them anew and computes the
    same."""
    model = uneven_model(architecture)
    size = sum(parameter.numel() for parameter in model.parameters())
    first, _ = built(model, prepack=False)
    storages = {
        parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()
    }
    assert sum(storage.untyped_storage().nbytes() for storage in storages.values()) == 4 * size
    before = Rows(first, LENGTHS).logits
    second, _ = built(model, prepack=False)
    for joined in (first, second):
        assert all(map(torch.equal, Rows(joined, LENGTHS).logits, before))


class OtherLlama(LlamaForCausalLM):
    """Of another make, as code is that comes with weights."""

    def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out


@pytest.mark.parametrize("trusted", [False, True])
def test_a_model_that_computes_something_else_keeps_its_own_forward(
    trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it passes for one of a known make: its logits tell."""
    if trusted:
        monkeypatch.setattr(decoder, "MAKES", (*decoder.MAKES, OtherLlama))
    model = uneven_model("llama")
    model.__class__ = OtherLlama
    plain = copy.deepcopy(model)
    paged, how = built(model)
    assert paged.decoder is None
    assert ("separate layers (error" in how) == trusted, how
    rows = Rows(paged, LENGTHS)
    for tokens, length, logits in zip(rows.tokens, LENGTHS, rows.logits, strict=True):
        assert error(logits, own_logits(plain, tokens[:length])) <= 5 * ERROR_FLOOR[torch.float32]
