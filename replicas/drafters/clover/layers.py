"""The forward pass of a Clover-2 head.

At position i the augmenting layers see the target's hidden state there, joined with the token at
i + 1. What they put out at a row's last position is the state that drafting begins with; each
drafted token changes it. Only the augmenting layers hold keys and values, and drafted tokens never
enter them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cosine_similarity, embedding, rms_norm, silu
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from replicas.drafters.checkpoints import Head
from replicas.drafters.clover.head_config import EMBEDDING, FIRST, HEAD, LATER, CloverConfig
from replicas.drafters.parts import joined_product, rotary_table, rotated
from replicas.invariant import Product
from replicas.models import AttentionBackend


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    before_attention: torch.Tensor  # [width]
    before_mlp: torch.Tensor  # [width]


@dataclass(frozen=True, slots=True)
class _Regressive:
    """x + cos(q, k) v by head, where q comes of x, k and v of the token."""

    query: Product
    key_value: Product
    norm: torch.Tensor  # [width]
    heads: int
    eps: float

    def __call__(self, x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:  # [tokens, width]
        by_head = (x.shape[0], self.heads, -1)
        queries = self.query(rms_norm(x, self.norm.shape, self.norm, self.eps)).view(by_head)
        keys, values = (half.reshape(by_head) for half in self.key_value(token).chunk(2, -1))
        likeness = cosine_similarity(queries, keys, dim=-1, eps=self.eps)
        return x + (likeness[..., None] * values).flatten(1)


class CloverLayers:
    """A head on a paged cache of its own."""

    def __init__(
        self,
        head: Head[CloverConfig],
        lm_head: torch.Tensor,  # [vocabulary, width]: the target's
        backend: AttentionBackend,
        prepack: bool,
    ) -> None:
        self.config = config = head.config
        self.backend, self._tensors = backend, head.tensors
        tensors = head.tensors

        def product(*names: str) -> Product:
            return joined_product(tensors, names, prepack)

        def regressive(name: str) -> _Regressive:
            parts = (product(f"{name}.q"), product(f"{name}.k", f"{name}.v"))
            norm = tensors[f"{name}.input_layernorm.weight"]
            return _Regressive(*parts, norm, config.num_attention_heads, config.eps)

        self._embeddings = tensors.get(EMBEDDING, lm_head)
        self._lm_head = Product.of(tensors.get(HEAD, lm_head), None, prepack)
        self._enter, self._go_on = regressive(FIRST), regressive(LATER)
        self._first, self._later = product("clover_head_mlp"), product("clover_head_mlp2")
        self._layers = [
            _Layer(
                qkv=product(*(f"{name}self_attn.{letter}_proj" for letter in "qkv")),
                out=product(f"{name}self_attn.o_proj"),
                gate_up=product(f"{name}mlp.gate_proj", f"{name}mlp.up_proj"),
                down=product(f"{name}mlp.down_proj"),
                before_attention=tensors[f"{name}input_layernorm.weight"],
                before_mlp=tensors[f"{name}post_attention_layernorm.weight"],
            )
            for name in (f"layers.{number}." for number in range(config.num_hidden_layers))
        ]
        store, rotary = backend.cache.layers[0], LlamaRotaryEmbedding(config.layer)
        self._cos, self._sin = rotary_table(rotary, backend.cache.shape.context_len, store)

    def augmented(
        self,
        hidden: torch.Tensor,  # [tokens, width]: the target's
        following: torch.Tensor,  # [tokens], int64: the tokens at the next positions
        layout: Any,
        kept: torch.Tensor,  # [n], int64
    ) -> torch.Tensor:  # [n, width]
        """Write keys and values of all tokens; the states after those of `kept`."""
        x = self._enter(hidden, embedding(following, self._embeddings))
        config, cache = self.config, self.backend.cache
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        dim = config.head_dim
        attention = self.backend.begin(layout)
        positions = layout.positions[: x.shape[0]]
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(self._norm(x, layer.before_attention)).view(x.shape[0], -1, dim)
            turned = rotated(qkv[:, : heads + kv_heads], cos, sin)
            qkv = torch.cat((turned, qkv[:, heads + kv_heads :]), 1)
            cache.write(number, layout.slots, qkv[:, heads:].reshape(-1, 2, kv_heads, dim))
            attended = attention(number, qkv, dim**-0.5)
            if number == len(self._layers) - 1:
                attended, x = attended[kept], x[kept]
            x = x + layer.out(attended)
            gate, up = layer.gate_up(self._norm(x, layer.before_mlp)).chunk(2, -1)
            x = x + layer.down(silu(gate).mul_(up))
        return self._norm(x, self._tensors["clover_norm.weight"])

    def first(self, state: torch.Tensor) -> torch.Tensor:  # [rows, width] -> [rows, vocab]
        """The logits of the first draft token."""
        return self._logits(self._first(state))

    def later(
        self,
        state: torch.Tensor,  # [rows, width]
        token: torch.Tensor,  # [rows], int64: drafted
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, vocab], [rows, width]
        """The logits of the draft token after this one, and the state that has taken it in."""
        embedded = embedding(token, self._embeddings)
        state = self._go_on(state, embedded)
        return self._logits(self._later(torch.cat((state, embedded), -1))), state

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._lm_head(self._norm(x, self._tensors["clover_head_norm.weight"]))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self.config.eps)
