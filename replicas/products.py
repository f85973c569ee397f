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
_SMALL = 100_000
_FEW_TOKENS = 32
"""Weights of fewer numbers are multiplied faster as they are where there are fewer tokens: half of
the faster product's time is its call then."""


@dataclass(frozen=True, slots=True)
class Product:
    """x W^T + b."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]
    packed: torch.Tensor | None = None  # the weight in oneDNN's own layout
    packed_from: int = 0
    """Tokens from which on that layout is the faster one."""

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,  # [out, in]
        bias: torch.Tensor | None,  # [out]
        pack: bool,
    ) -> Product:
        """With `pack` a large weight is laid out a second time, where this torch can."""
        if not pack or weight.numel() < PACKED_LEAST or not can_pack(weight.device, weight.dtype):
            return cls(weight, bias)
        packed = _operations()._reorder_linear_weight(weight.detach(), _TOKENS)
        return cls(weight, bias, packed, _FEW_TOKENS if weight.numel() < _SMALL else 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, in] -> [tokens, out]
        if self.packed is None or x.shape[0] < self.packed_from:
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
        """The residual and the product."""
        if self.packed is not None and x.shape[0] >= self.packed_from:
            # Added within oneDNN's product it takes 15 to 25 microseconds more.
            return self(x).add_(residual)
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
