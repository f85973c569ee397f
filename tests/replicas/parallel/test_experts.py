"""Proves: ranks that share the width of each expert compute together what the whole model does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from replicas.errors import PairRefused
from replicas.models.own_code.experts import experts_of
from replicas.models.own_code.layer_reading import computing_by
from replicas.models.weights.rank_weights import _divide_experts
from tests.replicas.families import family_model


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_parts_of_experts_add_up_to_the_experts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss has biases, and gate and up side by side."""
    monkeypatch.setattr(dist, "all_reduce", lambda out: None)
    whole = family_model(kind)
    (first, *_) = experts_of(whole)
    x = torch.randn(5, 32)
    index = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0]])
    weights = torch.rand(5, 2)
    with torch.inference_mode(), computing_by(whole, "eager", "eager"):
        expected = first(x, index, weights)
        got = torch.zeros_like(expected)
        for rank in range(2):
            part = family_model(kind)
            (own, *_) = experts_of(part)
            _divide_experts("experts", own, rank, 2)
            with computing_by(part, "eager", "eager"):
                got += own(x, index, weights)
    assert torch.allclose(got, expected, atol=1e-5)


def test_experts_that_cannot_be_shared_evenly_are_refused() -> None:
    (first, *_) = experts_of(family_model("qwen3_moe"))
    with pytest.raises(PairRefused, match="width 16 cannot be shared by 3 ranks"):
        _divide_experts("experts", first, 0, 3)
