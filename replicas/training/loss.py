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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        if x.device.type != "cpu":
            kind = x.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        needs = x.requires_grad or weight.requires_grad
        narrow, narrow_x = weight.detach().to(dtype), x.detach().to(dtype)
        of_x = torch.zeros_like(x)
        of_weight = torch.zeros_like(weight) if needs else weight
        loss = x.new_zeros((), dtype=torch.float32)
        guessed = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        for begin in range(0, x.shape[0], ROWS):
            rows = slice(begin, begin + ROWS)
            logits = (narrow_x[rows] @ narrow.T).float()
            guessed[rows] = logits.argmax(-1)
            whole = logits.logsumexp(-1, keepdim=True)
            some, own = chances[rows], logits.gather(1, ids[rows])
            loss += (some * (whole - own)).sum()
            if needs:
                # Of sum(p) * logsumexp(z) - sum(p * z).
                gradient = logits.sub_(whole).exp_().mul_(some.sum(-1, keepdim=True))
                gradient = gradient.scatter_add_(1, ids[rows], -some).to(dtype)
                of_x[rows] = (gradient @ narrow).to(x.dtype)
                of_weight += (gradient.T @ narrow_x[rows]).to(weight.dtype)
        ctx.save_for_backward(of_x, of_weight)
        ctx.mark_non_differentiable(guessed)
        return loss, guessed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        of_x, of_weight = ctx.saved_tensors
        return of_x * of_loss, of_weight * of_loss, None, None


def soft_cross_entropy(
    x: torch.Tensor,  # [n, width]
    weight: torch.Tensor,  # [vocab, width]
    ids: torch.Tensor,  # [n, likely], int64
    chances: torch.Tensor,  # [n, likely], float32; 0 for what is not in the vocabulary
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over slots of -sum(chances * log softmax(weight x)[ids]), and the likeliest id of
    each slot. The gradient is computed with the sum, in parts."""
    loss, guessed = _SoftCrossEntropy.apply(x, weight, ids, chances)  # type: ignore[no-untyped-call]
    return loss, guessed
