"""Products of tokens with a weight, on a CPU in the layout that the processor multiplies fastest.

torch's own product in float32 lays a weight out anew for every call and does not use the widest
vectors of every processor: at 8 tokens and 4,096 outputs it takes three times as long as oneDNN
does with a weight that was laid out once. torch has oneDNN on board, and its compiler's operations
reach it without a compiler.

A weight that is laid out is there twice: the model's modules keep theirs. The memory plan counts
it, and leaves it out where memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

PACKED_LEAST = 50_000
"""Numbers in a weight from which on the faster product outweighs its call, some 10 microseconds."""
_TOKENS = 64
"""Tokens that the layout is made for; it is the fastest one for fewer, too."""


@dataclass(frozen=True, slots=True)
class Product:
    """x W^T + b."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]
    packed: torch.Tensor | None  # the weight in oneDNN's own layout

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,  # [out, in]
        bias: torch.Tensor | None,  # [out]
        pack: bool,
    ) -> Product:
        """With `pack` a large weight is laid out a second time, where this torch can."""
        if not pack or weight.numel() < PACKED_LEAST or not can_pack(weight.device, weight.dtype):
            return cls(weight, bias, None)
        return cls(weight, bias, _operations()._reorder_linear_weight(weight.detach(), _TOKENS))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, in] -> [tokens, out]
        if self.packed is None:
            return linear(x, self.weight, self.bias)
        out: torch.Tensor = _operations()._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return out

    def added(
        self,
        x: torch.Tensor,  # [tokens, in]
        residual: torch.Tensor,  # [tokens, out]
    ) -> torch.Tensor:  # [tokens, out]
        """The residual and the product, in one operation."""
        if self.packed is not None:
            out: torch.Tensor = _operations()._linear_pointwise(
                x, residual, self.packed, self.bias, "add"
            )
            return out
        if self.bias is not None:
            residual = residual + self.bias
        return torch.addmm(residual, x, self.weight.t())


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a faster layout for such weights here."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(_operations(), "_reorder_linear_weight")
        and hasattr(_operations(), "_linear_pointwise")
    )


def _operations() -> Any:
    return torch.ops.mkldnn
