"""Cross-entropy with the target's probabilities, without keeping logits for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

ROWS = 1024
"""Slots whose logits exist at once."""


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,  # [n, width]
        weight: torch.Tensor,  # [vocab, width]
        ids: torch.Tensor,  # [n, likely], int64
        chances: torch.Tensor,  # [n, likely]
        fixed: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        if x.device.type != "cpu":
            kind = x.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        needs = x.requires_grad or weight.requires_grad
        narrow, narrow_x = weight.detach().to(dtype), x.detach().to(dtype)
        of_x = torch.zeros_like(x)
        learns = needs and fixed < weight.shape[1]
        of_weight = torch.zeros_like(weight) if learns else None
        losses = torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
        guessed = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        for begin in range(0, x.shape[0], ROWS):
            rows = slice(begin, begin + ROWS)
            logits = (narrow_x[rows] @ narrow.T).float()
            guessed[rows] = logits.argmax(-1)
            whole = logits.logsumexp(-1, keepdim=True)
            some, own = chances[rows], logits.gather(1, ids[rows])
            losses[rows] = (some * (whole - own)).sum(-1)
            if needs:
                # Of sum(p) * logsumexp(z) - sum(p * z).
                gradient = logits.sub_(whole).exp_().mul_(some.sum(-1, keepdim=True))
                gradient = gradient.scatter_add_(1, ids[rows], -some).to(dtype)
                of_x[rows] = (gradient @ narrow).to(x.dtype)
                if of_weight is not None:
                    of_weight[:, fixed:] += (gradient.T @ narrow_x[rows, fixed:]).to(weight.dtype)
        ctx.save_for_backward(of_x, of_weight)
        ctx.mark_non_differentiable(guessed, losses)
        return losses.sum(), guessed, losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
        of_x, of_weight = ctx.saved_tensors
        of_weight = None if of_weight is None else of_weight * of_loss
        return of_x * of_loss, of_weight, None, None, None


def soft_cross_entropy(
    x: torch.Tensor,  # [n, width]
    weight: torch.Tensor,  # [vocab, width]
    ids: torch.Tensor,  # [n, likely], int64
    chances: torch.Tensor,  # [n, likely], float32; 0 for what is not in the vocabulary
    fixed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum over slots of -sum(chances * log softmax(weight x)[ids]); the likeliest id of each
    slot; what each slot adds to the sum, without gradient.

    The gradient is computed with the sum, in parts; the first `fixed` columns of the weight get
    none.
    """
    apply: Any = _SoftCrossEntropy.apply
    loss, guessed, losses = apply(x, weight, ids, chances, fixed)
    return loss, guessed, losses
