"""A model whose every layer computes in tiles of one fixed shape: batch-invariant in any dtype.

Linear layers, norms and activations see tiles of TILE tokens, the last one padded; a token's result
then depends on the token and the weights, not on how many there are. That holds if, within one
shape, a row's result does not depend on its place in the tile, which kernels do not promise:
`check` measures it on the loaded model, bit for bit.

This is `deterministic` where layers are not joined, and on a CPU but for float32, where the proof
at load makes it needless. The idea of invariant kernels is that of He et al., "Defeating
Nondeterminism in LLM Inference" (2025); tiles of whole library calls replace kernels of one's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from replicas.errors import PairRefused
from replicas.invariant.ops import TILE, in_tiles


def compute_in_tiles(model: PreTrainedModel) -> None:
    """Give the model's layers forward passes in tiles.

    Raises PairRefused for a model with layers that are not row-wise.
    """
    hidden = model.config.hidden_size
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or next(module.children(), None) is not None:
            continue
        if "RotaryEmbedding" in type(module).__name__:
            module.forward = _tiled_rotary(module.forward)
            continue
        arguments = inspect.signature(module.forward).parameters
        if len(arguments) != 1:
            raise PairRefused(
                f"{name}: {type(module).__name__} takes {', '.join(arguments)}; only layers that"
                " treat each token for itself can be deterministic"
            )
        module.forward = _tiled_layer(module, hidden)


def _tiled_layer(module: nn.Module, hidden: int) -> Callable[[torch.Tensor], torch.Tensor]:
    plain = module.forward
    weight: torch.Tensor | None = getattr(module, "weight", None)
    rows = TILE
    if weight is not None and weight.dim() == 1:
        # A norm of single heads sees many rows per token: as many per tile as fill a token's width.
        rows *= max(1, hidden // weight.shape[0])

    def forward(x: torch.Tensor) -> torch.Tensor:
        return in_tiles(plain, rows, x)

    return forward


def _tiled_rotary(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Sines and cosines of a tile of positions at a time."""

    def forward(
        x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:  # each [rows, width, dim]
        flat = position_ids.reshape(-1)
        padded = pad(flat, (0, -flat.shape[0] % TILE))
        parts = [plain(x, part[None], *args, **kwargs) for part in torch.split(padded, TILE)]
        cos, sin = (torch.cat(tables, dim=1) for tables in zip(*parts, strict=True))
        shape = (*position_ids.shape, cos.shape[-1])
        return cos[0, : flat.shape[0]].view(shape), sin[0, : flat.shape[0]].view(shape)

    return forward
