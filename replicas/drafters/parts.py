"""Parts of layers that heads share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from replicas.invariant import Product


def joined_product(
    tensors: Mapping[str, torch.Tensor], names: Sequence[str], prepack: bool
) -> Product:
    """One product with all of these weights, and biases where there are any."""
    weights, biases = (
        [tensors[key] for name in names if (key := f"{name}.{part}") in tensors]
        for part in ("weight", "bias")
    )
    bias = torch.cat(biases) if biases else None
    return Product.of(weights[0] if len(weights) == 1 else torch.cat(weights), bias, prepack)


def rotary_table(
    rotary: Any,  # transformers' module
    positions: int,
    like: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # [positions, head_dim] each
    """Cosines and sines of the first positions, on this tensor's device and in its dtype."""
    angles = torch.arange(positions).double()[:, None] * rotary.inv_freq.double()
    angles = torch.cat((angles, angles), -1)
    cos, sin = (turn * rotary.attention_scaling for turn in (angles.cos(), angles.sin()))
    return cos.to(like.device, like.dtype), sin.to(like.device, like.dtype)


def rotated(
    x: torch.Tensor,  # [tokens, heads, head_dim]
    cos: torch.Tensor,  # [tokens, 1, head_dim]
    sin: torch.Tensor,
) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
