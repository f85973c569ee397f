"""One transformers model run over a paged KV cache.

The model is plugged in twice: the cache through `past_key_values`, the attention through
transformers' attention interface. Nothing else of a model is touched, so any decoder-only model
with full attention works.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from replicas.paged_cache import PagedCache, Window

ATTENTION = "lockstep_paged"

_OTHER_MATHS = frozenset({"softcap", "s_aux", "position_bias", "sinks"})
"""Arguments by which models ask the interface for another function than softmax(QK)V."""


class UnsupportedAttention(ValueError):
    """Serving the model would silently compute something else than the model does."""


def refuse_other_maths(arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedAttention when a model asks for more than plain softmax attention."""
    for name in _OTHER_MATHS & arguments.keys():
        if arguments[name] is not None:
            raise UnsupportedAttention(f"the model's attention needs {name!r}, which is not served")


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,  # [rows, heads, width, head_dim]
    key: torch.Tensor,  # [rows, kv_heads, length, head_dim]
    value: torch.Tensor,  # [rows, kv_heads, length, head_dim]
    attention_mask: torch.Tensor | None,  # [rows or 1, 1, width, length], 0 or -inf
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # [rows, width, heads, head_dim]
    """Attention for transformers' interface; query heads that share a KV head become its rows.

    Folding the query group into the width spares a repeated copy of keys and values.
    """
    refuse_other_maths(kwargs)
    rows, heads, width, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if group > 1:
        query = query.reshape(rows, kv_heads, group * width, dim)
        if attention_mask is not None and width > 1:
            masks, _, _, length = attention_mask.shape
            attention_mask = attention_mask.expand(masks, group, width, length).reshape(
                masks, 1, group * width, length
            )
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, is_causal=False
    )
    return out.reshape(rows, heads, width, value.shape[-1]).transpose(1, 2), None


AttentionInterface.register(ATTENTION, paged_attention)


class PagedModel:
    """A causal language model and its own paged KV cache."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache
        self.vocab = int(model.config.vocab_size)
        """Rows of the embedding, its padding included: logits have this many."""

    def forward(
        self,
        tokens: torch.Tensor,  # [rows, width], int64
        window: Window,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:  # [rows, width or logits_to_keep, vocab]
        """Logits of the window's positions; their KV entries are written on the way."""
        self._cache.enter(window)
        out = self._model(
            input_ids=tokens,
            attention_mask=window.mask,
            position_ids=window.positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        logits: torch.Tensor = out.logits
        return logits
