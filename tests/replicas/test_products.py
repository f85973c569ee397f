"""Proves that a weight in another layout gives the same product, and costs what the plan says."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from replicas.buffers import ModelShape, packed_bytes
from replicas.products import PACKED_LEAST, Product, can_pack
from tests.memory_meter import peak_bytes

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not can_pack(CPU, torch.float32), reason="this torch has no oneDNN"
)


def weights(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn((outputs, inputs), generator=generator) / inputs**0.5
    return weight, torch.randn(outputs, generator=generator)


@needs_packing
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(4096, 192), (320, 192), (257, 300)])
@torch.inference_mode()
def test_a_packed_product_is_the_product(shape: tuple[int, int], biased: bool, tokens: int) -> None:
    weight, bias = weights(*shape)
    product = Product.of(weight, bias if biased else None, pack=True)
    assert product.packed is not None
    x = torch.randn((tokens, shape[1]), generator=torch.Generator().manual_seed(2))
    residual = torch.randn((tokens, shape[0]), generator=torch.Generator().manual_seed(3))
    before = residual.clone()
    expected = linear(x.double(), weight.double(), bias.double() if biased else None)
    limit = 1e-5 * expected.abs().max()
    assert (product(x) - expected).abs().max() <= limit
    assert (product.added(x, residual) - (residual + expected)).abs().max() <= limit
    assert torch.equal(residual, before)


@pytest.mark.parametrize("pack", [False, True])
@torch.inference_mode()
def test_a_small_weight_keeps_its_layout(pack: bool) -> None:
    weight, bias = weights(100, PACKED_LEAST // 100 - 1)
    product = Product.of(weight, bias, pack)
    assert product.packed is None
    x = torch.randn((3, weight.shape[1]))
    assert torch.equal(product(x), linear(x, weight, bias))
    residual = torch.randn((3, 100))
    difference = product.added(x, residual) - (residual + linear(x, weight, bias))
    assert difference.abs().max() <= 1e-5


def test_other_numbers_keep_their_layout() -> None:
    weight, _ = weights(1000, 200)
    assert Product.of(weight.bfloat16(), None, pack=True).packed is None
    assert Product.of(weight.to("meta"), None, pack=True).packed is None


@needs_packing
def test_packed_weights_take_what_the_plan_says() -> None:
    """Of sizes that are no multiples of anything: at least the weights, at most the plan."""
    shape = ModelShape(
        layers=2, heads=3, kv_heads=1, head_dim=50, hidden=300, intermediate=700, vocab=2001
    )
    large = [(250, 300), (1400, 300), (300, 700)] * 2 + [(2001, 300)]
    kept = []

    def pack() -> None:
        kept.extend(Product.of(weight, None, pack=True) for weight, _ in made)

    made = [weights(*one) for one in large]
    grown = peak_bytes(pack)
    assert len(kept) == len(large)
    assert sum(weight.nbytes for weight, _ in made) <= grown <= packed_bytes(shape, 4)
