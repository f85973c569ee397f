"""A model's own logits without a cache, as loaded or computed in float64.

The measure by which joined layers are accepted, and by which `lockstep verify` judges ties.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_NORM_RTOL = 1e-5
"""What float32 may change in a norm's output."""


@torch.inference_mode()
def own_logits(
    model: PreTrainedModel,
    tokens: torch.Tensor,  # [tokens], int64
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [tokens, vocab]
    """The logits of transformers' own forward pass. In another dtype weights are converted one
    module at a time, so that they are never doubled."""
    handles: list[Any] = []
    if dtype is not None:
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                handles += _computing_in(module, dtype)
    try:
        logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return logits


def _computing_in(module: nn.Module, dtype: torch.dtype) -> tuple[Any, Any]:
    """Hooks by which a module computes in another dtype."""
    kept: dict[str, torch.Tensor] = {}
    eps = getattr(module, "variance_epsilon", None)

    def before(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            kept[name] = parameter.data
            parameter.data = parameter.data.to(dtype)

    def after(module: nn.Module, arguments: tuple[Any, ...], out: torch.Tensor) -> Any:
        if eps is not None and "RMSNorm" in type(module).__name__:
            # Most compute in float32, whatever they are given; others compute something else.
            x = arguments[0]
            exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            exact = exact * module.get_parameter("weight")
            if torch.allclose(exact, out, rtol=_NORM_RTOL, atol=0.0):
                out = exact
        for name, parameter in module.named_parameters(recurse=False):
            parameter.data = kept.pop(name)
        return out

    return module.register_forward_pre_hook(before), module.register_forward_hook(after)
