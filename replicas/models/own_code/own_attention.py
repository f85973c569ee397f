"""Lets a model that attends by a method of its own do so through transformers' interface.

Some older families have `_attn(query, key, value, attention_mask)` where newer ones ask the
interface. How it scales its scores and how far back it looks is measured on the method itself. The
check at load holds what comes of it against the method, as for every model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

_METHOD = "_attn"
_ARGUMENTS = ["query", "key", "value", "attention_mask"]
_WINDOW = "sliding_window"
"""A module's own attribute, as other families have it: the check at load makes it shorter."""
_NEAR = 1e-4


def attend_by_interface(model: PreTrainedModel, ours: frozenset[str]) -> None:
    """Let such methods ask the interface while the model computes by one of these implementations
    of it. A second call does nothing."""
    positions = getattr(model.config, "max_position_embeddings", 0)
    for module in model.modules():
        plain = getattr(module, _METHOD, None)
        if isinstance(plain, MethodType) and [*inspect.signature(plain).parameters] == _ARGUMENTS:
            setattr(module, _METHOD, _OwnAttention(module, plain, model.config, ours, positions))


class _OwnAttention:
    """Takes the method's place."""

    def __init__(
        self,
        module: nn.Module,
        plain: Callable[..., Any],
        config: Any,
        ours: frozenset[str],
        positions: int,
    ) -> None:
        self._module, self._plain, self._config, self._ours = module, plain, config, ours
        self._scaling: float | None = None
        if next(module.parameters()).is_meta:  # sizes alone
            return
        zeros = torch.zeros((1, 1, positions, 1), device=next(module.parameters()).device)
        _, weights = plain(zeros[:, :, :1], zeros, zeros)
        seen = int(weights.count_nonzero())
        if seen < positions:
            setattr(module, _WINDOW, seen)

    def __call__(
        self,
        query: torch.Tensor,  # [1, heads, tokens, head_dim]
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Any]:  # [1, heads, tokens, head_dim]
        name, window = self._config._attn_implementation, getattr(self._module, _WINDOW, None)
        if name in self._ours:
            attend = AttentionInterface()[name]
            if self._scaling is None and not query.is_meta:
                self._scaling = self._measured(query)
            out, weights = attend(
                *(self._module, query, key, value, attention_mask),
                scaling=self._scaling,
                own_window=window,
            )
            return out.transpose(1, 2), weights
        if window is not None:
            seen = _within(window, query.shape[2], key.shape[2], query.device)
            hidden = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
            hidden = hidden.masked_fill(~seen, torch.finfo(torch.float32).min)
            attention_mask = hidden if attention_mask is None else attention_mask + hidden
        out, weights = self._plain(query, key, value, attention_mask)
        return out, weights

    def _measured(self, query: torch.Tensor) -> float:
        """By how much a score is multiplied: one, or the usual root of the width."""
        width = query.shape[3]
        one = torch.zeros((1, 1, 2, width), device=query.device)
        one[..., 1, 0] = 1.0
        _, weights = self._plain(one[:, :, 1:], one, one)
        found = math.log(float(weights[0, 0, 0, 1] / weights[0, 0, 0, 0]))
        usual = (1.0, width**-0.5)
        return next((scaling for scaling in usual if abs(found - scaling) < _NEAR), found)


def _within(window: int, queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Which keys each of the last queries sees, [queries, keys]."""
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    return torch.arange(keys, device=device)[None] > query - window
