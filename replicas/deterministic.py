"""Batch-invariant forward passes: the same bits for a token whatever is computed beside it.

A kernel chooses how to split its sums by the shape it is given, so in bfloat16 a token's logits
round differently in a batch of 8 than alone, or verified among k + 1 than decoded. Here every
operation that sums or that a library may vectorise differently gets *tiles of one fixed shape*:

- Linear layers, norms and activations see tiles of a fixed number of token rows, the last one
  padded. A row's result then depends on the row and on the weights, not on how many there are.
- Attention is computed over chunks of a fixed number of KV positions, and chunks are combined in
  batch. A position always has the same place in the same chunk; a chunk that is masked altogether
  contributes exactly nothing, so the length of batch mates does not count.
- Everything else a decoder does (embedding, residual sums, rotation, products, argmax) treats each
  element for itself or is exact.

That holds if, within one shape, a row's result does not depend on its place in the tile, which
kernels do not promise: `replicas.invariance` measures it on the loaded model, bit for bit.

Only the target needs this: the draft decides no token. Fixed shapes cost time; `benchmarks.gpu`
shows how much. The idea of invariant kernels is that of He et al., "Defeating Nondeterminism in LLM
Inference" (2025); tiles of whole library calls replace kernels of one's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from replicas.invariance import check_invariance
from replicas.tiles import EFFICIENT, TILED, TILES, in_tiles

ATTENTIONS = {"cpu": (TILED,), "cuda": (EFFICIENT, TILED)}
"""Tried in this order, by device."""


class NotDeterministic(ValueError):
    """The model cannot be made batch-invariant here; the message says what stands against it."""


def make_deterministic(model: PreTrainedModel, context_len: int | None = None) -> None:
    """Give the model batch-invariant layers and attention, and check them on its device.

    Raises NotDeterministic for a model whose layers are not row-wise, or whose results change
    with the batch in spite of all.
    """
    device = model.device
    tile = TILES[device.type].rows
    hidden = model.config.hidden_size
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or next(module.children(), None) is not None:
            continue
        if "RotaryEmbedding" in type(module).__name__:
            module.forward = _tiled_rotary(module.forward, tile)
            continue
        arguments = inspect.signature(module.forward).parameters
        if len(arguments) != 1:
            raise NotDeterministic(
                f"{name}: {type(module).__name__} takes {', '.join(arguments)}; only layers that"
                " treat each token for itself can be deterministic"
            )
        module.forward = _tiled_layer(module, tile, hidden)
    differing: str | None = None
    choices = ATTENTIONS.get(device.type, (TILED,))
    for attention in choices:
        model.set_attn_implementation(attention)
        try:
            differing = check_invariance(model, context_len)
        except RuntimeError as error:  # no kernel for heads of this width, say
            if attention == choices[-1]:
                raise
            differing = str(error)
        if differing is None:
            return
    raise NotDeterministic(f"{type(model).__name__} on {device}: logits change with {differing}")


def _tiled_layer(
    module: nn.Module, tile: int, hidden: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    plain = module.forward
    weight: torch.Tensor | None = getattr(module, "weight", None)
    rows = tile
    if weight is not None and weight.dim() == 1:
        # A norm of single heads sees many rows per token: as many per tile as fill a token's width.
        rows *= max(1, hidden // weight.shape[0])

    def forward(x: torch.Tensor) -> torch.Tensor:
        return in_tiles(plain, rows, x)

    return forward


def _tiled_rotary(plain: Callable[..., Any], tile: int) -> Callable[..., Any]:
    """Sines and cosines of `tile` positions at a time."""

    def forward(
        x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:  # each [rows, width, dim]
        flat = position_ids.reshape(-1)
        padded = pad(flat, (0, -flat.shape[0] % tile))
        parts = [plain(x, part[None], *args, **kwargs) for part in torch.split(padded, tile)]
        cos, sin = (torch.cat(tables, dim=1) for tables in zip(*parts, strict=True))
        shape = (*position_ids.shape, cos.shape[-1])
        return cos[0, : flat.shape[0]].view(shape), sin[0, : flat.shape[0]].view(shape)

    return forward
