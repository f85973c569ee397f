"""Products of tokens with a weight whose bits depend on the token and the weight alone.

A matrix library chooses how to split its sums by the shape of a call, so a token's result may
differ when it is multiplied alone and among others. Here a product sees a tile of tokens at a time,
and only numbers of tokens for which `replicas.invariant.proof` has shown, on this processor and
library, that every row gets the bits that it gets among TILE tokens.

On a CPU in float32 a weight is kept a second time in oneDNN's own layout for 64 tokens. That
layout has the property for nearly all numbers of tokens, and it is the fastest: torch's own product
lays a weight out anew for every call. The model's modules keep theirs; the memory plan counts both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, pad

TILE = 64
"""Tokens that weights are laid out for, and by which all other numbers of tokens are judged."""
COUNTS = (*range(1, TILE + 1), *range(TILE + 16, 4 * TILE + 1, 16))
"""Numbers of tokens that a CPU's passes have: for each a library makes kernels, and keeps them."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The sizes in which a model's sums are the same for a token whatever is computed beside it."""

    tokens: tuple[int, ...] = ()
    """Numbers of tokens, rising, that a product may see; none: all. The last one is what it sees at
    most: a tile. Where there is no other, passes are whole tiles."""
    query_unit: int = 4
    """The queries of one attention product are a multiple of it."""
    one_unit: bool = False
    """Whether they are just one unit: more queries take more products."""
    piece: int = 192
    """KV positions whose weighted values are summed in one product."""
    kv_unit: int = 16
    """The KV positions that a row reads are a multiple of it."""
    proven: bool = False
    """Whether the proof has shown it for the loaded model; `status` says so."""

    @property
    def tile(self) -> int:
        return self.tokens[-1]

    def padded(self, count: int) -> int:
        """The number of tokens, at least `count`, that a pass over so many tokens computes."""
        if not self.tokens:
            return count
        whole, rest = divmod(count, self.tile)
        return whole * self.tile + (rest and self.tokens[bisect_left(self.tokens, rest)])

    def __str__(self) -> str:
        if not self.proven:
            return "sums may depend on the batch"
        if len(self.tokens) == 1:
            return f"one arithmetic: whole tiles of {self.tile} tokens"
        padded = [str(size) for size in range(1, TILE) if self.padded(size) != size]
        sizes = f", {' '.join(padded)} tokens padded" if padded else ""
        return f"one arithmetic: tiles of {self.tile}, KV pieces of {self.piece}{sizes}"


@dataclass(slots=True)
class Product:
    """x W^T + b, tile by tile."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]
    packed: torch.Tensor | None = None  # the weight in oneDNN's own layout
    tile: int | None = None
    """Tokens that one product sees at most; None: all."""

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,  # [out, in]
        bias: torch.Tensor | None,  # [out]
        prepack: bool,
    ) -> Product:
        """With `prepack` the weight is laid out a second time."""
        if not prepack:
            return cls(weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TILE)
        return cls(weight, bias, packed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, in] -> [tokens, out]
        if self.tile is None or x.shape[0] <= self.tile:
            return self._one(x)
        return torch.cat([self._one(tile) for tile in torch.split(x, self.tile)])

    def _one(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None or x.dtype is not self.packed.dtype:
            # A model's own layers are held against the same in a finer dtype.
            return linear(x, self.weight, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return out


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether such weights have a faster layout here."""
    operations: Any = torch.ops.mkldnn
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(operations, "_reorder_linear_weight")
        and hasattr(operations, "_linear_pointwise")
    )


_ALIGNED_BYTES = 64


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Libraries choose kernels by where a tensor begins, too."""
    return x.clone() if x.data_ptr() % _ALIGNED_BYTES else x


def in_tiles(
    function: Callable[[torch.Tensor], torch.Tensor],
    tile: int,
    x: torch.Tensor,  # [..., width]
) -> torch.Tensor:  # [..., width of the function's result]
    """Apply a row-wise function to tiles of exactly `tile` rows, the last one padded with zeros."""
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    flat = pad(flat, (0, 0, 0, -rows % tile)) if rows % tile else aligned(flat)
    if flat.shape[0] == tile:
        out = function(flat)
    else:
        out = torch.cat([function(part) for part in torch.split(flat, tile)])
    return out[:rows].view(*x.shape[:-1], out.shape[-1])
