"""The forward pass of a head: what it makes of the target's hidden states, and its one layer.

At position i the layer sees the token at i + 1 beside the target's hidden states at i, or beside
its own output at i - 1 where the target has none yet; its output says which token comes at i + 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import embedding, rms_norm, silu
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from replicas.drafters.checkpoints import Head
from replicas.drafters.eagle3.head_config import LAYER, Eagle3Config
from replicas.drafters.parts import joined_product, rotated
from replicas.invariant import Product
from replicas.models import AttentionBackend, ForwardOptions, Output


class HeadLayer:
    """A head on a paged cache of its own."""

    def __init__(
        self,
        head: Head[Eagle3Config],
        embeddings: torch.Tensor,  # [target's vocabulary, target's width], where it has none
        backend: AttentionBackend,
        prepack: bool,
    ) -> None:
        self.config = config = head.config
        self.ids, self.shift = head.ids, head.shift
        self.backend, self.device, self.vocab = backend, embeddings.device, config.vocab_size
        tensors = head.tensors
        self._norms = {key: value for key, value in tensors.items() if "norm" in key}
        self._embeddings = tensors.get("embed_tokens.weight", embeddings)
        self.cache = cache = backend.cache
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = config.head_dim
        self._scaling = self._dim**-0.5

        def product(*names: str) -> Product:
            return joined_product(tensors, names, prepack)

        attention, mlp = LAYER + "self_attn.", LAYER + "mlp."
        self._fc = product("fc")
        self._qkv = product(*(f"{attention}{letter}_proj" for letter in "qkv"))
        self._out = product(attention + "o_proj")
        self._gate_up = product(mlp + "gate_proj", mlp + "up_proj")
        self._down = product(mlp + "down_proj")
        self._lm_head = product("lm_head")
        rotary: Any = LlamaRotaryEmbedding(config.layer).to(embeddings.device)
        positions = torch.arange(cache.shape.context_len, device=embeddings.device)[None]
        cos, sin = rotary(torch.empty(0, dtype=cache.dtype, device=embeddings.device), positions)
        self._cos, self._sin = cos[0][:, None], sin[0][:, None]  # [context_len, 1, head_dim]

    def fused(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:  # each [tokens, target's]
        """What the layer sees of the target, [tokens, width]; in the order of `aux_layers`."""
        if self.config.fc_norm:
            hidden = [self._norm(states, f"fc_norm.{i}") for i, states in enumerate(hidden)]
        x = torch.cat(list(hidden), -1)
        return self._fc(self._norm(x, "input_norm") if self.config.norm_before_fc else x)

    def enter(
        self,
        tokens: torch.Tensor,  # [tokens], int64: those at the next positions, the target's ids
        hidden: torch.Tensor,  # [tokens, width]
        layout: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values. Returns queries, keys and values, [tokens, heads + 2 * kv_heads,
        head_dim], and the residual, [tokens, width]."""
        embedded = embedding(tokens.clamp(max=self._embeddings.shape[0] - 1), self._embeddings)
        embedded = self._norm(embedded, LAYER + "input_layernorm")
        normed = self._norm(hidden, LAYER + "hidden_norm")
        residual = normed if self.config.norm_before_residual else hidden
        x = self._qkv(torch.cat((embedded, normed), -1))
        x = x.view(x.shape[0], -1, self._dim)
        heads, turned = self._heads, self._heads + self._kv_heads
        queries, keys, values = x[:, :heads], x[:, heads:turned], x[:, turned:]
        if self.config.layer.model_type == "qwen3":
            queries = self._norm(queries, LAYER + "self_attn.q_norm")
            keys = self._norm(keys, LAYER + "self_attn.k_norm")
        cos, sin = self._cos[layout.positions], self._sin[layout.positions]
        both = rotated(torch.cat((queries, keys), 1), cos, sin)
        x = torch.cat((both, values), 1)
        self.cache.write(0, layout.slots, x[:, heads:].view(-1, 2, self._kv_heads, self._dim))
        return x, residual

    def forward(
        self,
        tokens: torch.Tensor,  # [tokens], int64, as in `enter`
        layout: Any,
        options: ForwardOptions,
        hidden: torch.Tensor,  # [tokens, width]
    ) -> Output:
        """All logits of the layer's output, as its hidden states what the next position sees."""
        entered, residual = self.enter(tokens, hidden, layout)
        attention = self.backend.begin(layout)
        x = self._out(attention(0, entered, self._scaling)).add_(residual)
        gate, up = self._gate_up(self._norm(x, LAYER + "post_attention_layernorm")).chunk(2, -1)
        x = self._down(silu(gate).mul_(up)).add_(x)
        normed = self._norm(x, "norm")
        return Output(self._lm_head(normed), [normed if self.config.norm_output else x])

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._norms[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, self.config.eps)
