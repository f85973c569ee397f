"""The layers of a one-pass head on a paged cache of its own.

The cache holds context alone: for each committed token keys and values that are made of the
target's hidden states there. Those of a block live for one pass and are never written, so they
cannot reach blocks that rows share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from replicas.drafters.checkpoints import Head
from replicas.drafters.one_pass.head_config import MASK, OnePassConfig
from replicas.drafters.parts import joined_product, rotary_table, rotated
from replicas.invariant import Product
from replicas.kv_cache import PagedCache
from replicas.memory import COPIED_MOST
from replicas.transfers import upload


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    before_attention: torch.Tensor  # [width]
    before_mlp: torch.Tensor  # [width]
    query_norm: torch.Tensor  # [head_dim]
    key_norm: torch.Tensor  # [head_dim]


class OnePassLayers:
    def __init__(
        self,
        head: Head[OnePassConfig],
        embeddings: torch.Tensor,  # [target's vocabulary, width], where it has none
        lm_head: torch.Tensor,  # [target's vocabulary, width], where it has none
        cache: PagedCache,
        prepack: bool,
    ) -> None:
        self.config = config = head.config
        self.ids, self.cache, self.device = head.ids, cache, embeddings.device
        self._tensors = tensors = head.tensors
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._embeddings = tensors.get("embed_tokens.weight", embeddings)
        self._mask = tensors.get(MASK)
        self._lm_head = Product.of(tensors.get("lm_head.weight", lm_head), None, prepack)
        self._fc = Product.of(tensors["fc.weight"], None, prepack)

        def product(names: Sequence[str]) -> Product:
            return joined_product(tensors, names, prepack)

        names = [f"layers.{number}." for number in range(config.num_hidden_layers)]
        self._context = product([f"{name}self_attn.{of}_proj" for name in names for of in "kv"])
        self._layers = [
            _Layer(
                qkv=product([f"{name}self_attn.{of}_proj" for of in "qkv"]),
                out=product([f"{name}self_attn.o_proj"]),
                gate_up=product([f"{name}mlp.gate_proj", f"{name}mlp.up_proj"]),
                down=product([f"{name}mlp.down_proj"]),
                before_attention=tensors[f"{name}input_layernorm.weight"],
                before_mlp=tensors[f"{name}post_attention_layernorm.weight"],
                query_norm=tensors[f"{name}self_attn.q_norm.weight"],
                key_norm=tensors[f"{name}self_attn.k_norm.weight"],
            )
            for name in names
        ]
        # A block may lie at the end of the context.
        positions = cache.shape.context_len + config.block_size
        rotary = Qwen3RotaryEmbedding(config.layer)
        self._cos, self._sin = rotary_table(rotary, positions, cache.layers[0])

    def write_context(
        self,
        hidden: Sequence[torch.Tensor],  # each [tokens, target's width], in order of `aux_layers`
        layout: Any,  # of the same tokens
    ) -> None:
        """Write what the layers see of tokens that are committed."""
        features = self._norm(self._fc(torch.cat(list(hidden), -1)), "hidden_norm")
        kv = self._context(features)
        shape = (kv.shape[0], -1, 2, self._kv_heads, self.config.head_dim)
        cos, sin = self._turns(layout.positions[: kv.shape[0]])
        for number, fresh in enumerate(kv.view(shape).unbind(1)):
            keys = self._normed(fresh[:, 0], self._layers[number].key_norm)
            fresh = torch.stack((rotated(keys, cos, sin), fresh[:, 1]), 1)
            self.cache.write(number, layout.slots, fresh)

    def forward(
        self,
        anchors: torch.Tensor,  # [rows], int64: the last tokens, the target's ids
        starts: Sequence[int],  # [rows]: their positions
        table: torch.Tensor,  # [rows, blocks], int64
    ) -> torch.Tensor:  # [rows, slots, width]
        """The block after each row's context, as it is before the output matrix."""
        rows, config = len(starts), self.config
        first = upload(starts, torch.int64, self.device)
        slots = torch.arange(config.block_size, device=self.device)
        positions = first[:, None] + slots  # [rows, slots]
        cos, sin = self._turns(positions.view(-1))
        x = self._entered(anchors)
        parts = list(self._parts(starts))
        kinds = list(zip(config.windows, config.causal, strict=True))
        seen = {
            kind: [self._visible(first[of], positions[of], reach, *kind) for of, reach in parts]
            for kind in set(kinds)
        }
        turned = self._heads + self._kv_heads
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(x, layer.before_attention))
            qkv = qkv.view(x.shape[0], -1, config.head_dim)
            queries = self._normed(qkv[:, : self._heads], layer.query_norm)
            keys = self._normed(qkv[:, self._heads : turned], layer.key_norm)
            fresh = (rotated(queries, cos, sin), rotated(keys, cos, sin), qkv[:, turned:])
            queries, keys, values = (
                new.view(rows, -1, *new.shape[1:]).transpose(1, 2) for new in fresh
            )
            attended = [
                self._attend(number, queries[of], keys[of], values[of], table[of], reach, mask)
                for (of, reach), mask in zip(parts, seen[kinds[number]], strict=True)
            ]
            x = x + layer.out(torch.cat(attended).view(x.shape[0], -1))
            gate, up = layer.gate_up(self._normed(x, layer.before_mlp)).chunk(2, -1)
            x = x + layer.down(silu(gate).mul_(up))
        return self._norm(x, "norm").view(rows, config.block_size, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [..., width] -> [..., vocab]
        logits = self._lm_head(hidden.reshape(-1, hidden.shape[-1]))
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if self.config.softcap:
            logits = (logits / self.config.softcap).tanh() * self.config.softcap
        return logits.view(*hidden.shape[:-1], -1)

    def _entered(self, anchors: torch.Tensor) -> torch.Tensor:  # [rows * slots, width]
        """The anchor's embedding, then the mask's."""
        rows, config = len(anchors), self.config
        masked = self._mask
        if masked is None:
            assert config.mask_token_id is not None
            masked = self._embeddings[config.mask_token_id]
        masked = masked.expand(rows, config.block_size - 1, -1)
        x = torch.cat((embedding(anchors, self._embeddings)[:, None], masked), 1)
        return x.flatten(0, 1) * config.embedding_scale

    def _parts(self, starts: Sequence[int]) -> Iterator[tuple[slice, int]]:
        """Rows whose context is copied together, and how far the longest of them reaches."""
        numbers = max(1, 2 * self._kv_heads * self.config.head_dim * max(starts))
        together = max(1, COPIED_MOST // numbers)
        for begin in range(0, len(starts), together):
            yield slice(begin, begin + together), max(starts[begin : begin + together])

    def _visible(
        self,
        first: torch.Tensor,  # [rows], int64
        positions: torch.Tensor,  # [rows, slots], int64
        reach: int,
        window: int | None,
        causal: bool,
    ) -> torch.Tensor:  # [rows, 1, slots, reach + slots], bool
        """What each slot sees of the context, and of its block."""
        context = torch.arange(reach, device=self.device).expand(len(first), -1)
        keys = torch.cat((context, positions), 1)[:, None]
        ahead = keys - positions[..., None]
        seen = torch.ones_like(ahead, dtype=torch.bool)
        seen[..., :reach] = keys[..., :reach] < first[:, None, None]
        if causal:
            seen &= ahead <= 0
        if window is not None:
            seen &= ahead.abs() < window
        return seen[:, None]

    def _attend(
        self,
        number: int,
        queries: torch.Tensor,  # [rows, heads, slots, head_dim]
        keys: torch.Tensor,  # [rows, kv_heads, slots, head_dim]
        values: torch.Tensor,  # [rows, kv_heads, slots, head_dim]
        table: torch.Tensor,  # [rows, blocks], int64
        reach: int,
        mask: torch.Tensor,  # [rows, 1, slots, reach + slots]
    ) -> torch.Tensor:  # [rows, slots, heads, head_dim]
        rows, heads, slots, dim = queries.shape
        if reach:
            blocks = table[:, : -(-reach // self.cache.shape.block_size)]
            context = self.cache.layers[number][blocks].flatten(1, 2)[:, :reach]
            both = context.permute(2, 0, 3, 1, 4)  # [2, rows, kv_heads, reach, head_dim]
            keys, values = (torch.cat(own, 2) for own in zip(both, (keys, values), strict=True))
        # Heads that share keys are rows of one product.
        queries = queries.reshape(rows, self._kv_heads, -1, dim)
        mask = mask.repeat(1, 1, heads // self._kv_heads, 1)
        out = scaled_dot_product_attention(queries, keys, values, mask, scale=dim**-0.5)
        return out.view(rows, heads, slots, dim).transpose(1, 2)

    def _turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of each position, [tokens, 1, head_dim]."""
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._normed(x, self._tensors[f"{name}.weight"])

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self.config.eps)
