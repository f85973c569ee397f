"""A model's own logits without a cache, as loaded or computed in a finer dtype.

The measure by which joined layers are accepted, and by which `lockstep verify` judges ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from replicas.models.own_code.layer_reading import computing_by

FINER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}
"""What stands for the truth beside a model's own dtype."""
_NORM_RTOL = 1e-5
"""What float32 may change in a norm's output."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Two float32 ways to the next token's logits, held against float64."""

    gap: float
    """By how much the expected token's logit is above the other one's, in float64."""
    error_expected: float
    """Greatest difference of a logit from float64, of the way that chose the expected token."""
    error_got: float
    choice: int
    """The token that float64 chooses."""

    @property
    def tie(self) -> bool:
        """Whether the two tokens are nearer to each other than the errors of both ways."""
        return abs(self.gap) <= self.error_expected + self.error_got


def judge(
    model: PreTrainedModel,
    content: Sequence[int],
    expected: int,
    got: int,
    logits: torch.Tensor,  # [vocab], of the way that chose `got`
) -> Judgement:
    """Which of two tokens after this content float64 chooses, and how far either way is from it."""
    tokens = torch.tensor(content, device=model.device)
    theirs = own_logits(model, tokens)[-1]
    truth = own_logits(model, tokens, torch.float64)[-1]
    errors = [float((found - truth).abs().max()) for found in (theirs, logits)]
    gap = float(truth[expected] - truth[got])
    return Judgement(gap, errors[0], errors[1], int(truth.argmax()))


@torch.inference_mode()
def own_logits(
    model: PreTrainedModel,
    tokens: torch.Tensor,  # [tokens], int64
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # [tokens, vocab]
    """The logits of transformers' own forward pass, attention and experts. In another dtype
    weights are converted one module at a time, so that they are never doubled."""
    handles: list[Any] = []
    if dtype is not None:
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                handles += _computing_in(module, dtype)
    try:
        with computing_by(model, "eager", "eager"):
            logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return logits


def _computing_in(module: nn.Module, dtype: torch.dtype) -> tuple[Any, Any]:
    """Hooks by which a module computes in another dtype."""
    kept: dict[str, torch.Tensor] = {}
    eps = getattr(module, "variance_epsilon", None)

    def before(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        for name, parameter in module.named_parameters(recurse=False):
            kept[name] = parameter.data
            parameter.data = parameter.data.to(dtype)
        # Some routers give a layer float32, whatever they are given.
        return tuple(
            value.to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for value in arguments
        )

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
