"""A Clover-2 head that learns: its pass over whole conversations, told the text.

It computes what `replicas.drafters.clover.layers` computes in serving. At slot i the augmenting
layers see the target's hidden state there, joined with the token at i + 1; the head guesses the
token at i + 2. In step j it is told the j tokens behind, one after the other, and guesses the next.
The loss is Clover-2's: the cross-entropy with the target's probabilities, and the distance from
the target's own hidden state where it guesses (arXiv 2408.00264). The cross-entropy is over the
draft vocabulary alone, since that is most of the work; the head drafts from the whole one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import (
    cosine_similarity,
    embedding,
    rms_norm,
    scaled_dot_product_attention,
    silu,
    smooth_l1_loss,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from replicas.drafters import FIRST, LATER, CloverConfig
from replicas.training.methods.head import Batch, TrainableHead, Unrolled, rotated

OUTPUT, LAST_NORM = "target_output.weight", "target_norm.weight"
"""The target's own."""
_DISTANCE = 10.0
"""What the distance counts beside the cross-entropy."""


class CloverHead(TrainableHead):
    config: CloverConfig

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rotary: Any = LlamaRotaryEmbedding(self.config.layer)
        learned = self._tensor(OUTPUT)[self.own_ids >= 0]
        self.register_buffer("_learned", learned, persistent=False)

    def forward(self, batch: Batch, step_weights: tuple[float, ...], at: int = 0) -> Unrolled:
        out = self.states(batch, len(step_weights))
        chosen = torch.arange(batch.begins.shape[1], device=batch.tokens.device)
        width = self.config.hidden_size
        told = self._told(batch, chosen, out, self.get_buffer("_learned"), step_weights, width)
        # What the target has where it chooses the token: one slot on for each step.
        ahead = torch.arange(1, len(step_weights) + 1, device=chosen.device)
        slots, there = batch.begins[..., None] + ahead, told.there
        rows = torch.arange(len(slots), device=slots.device)[:, None, None].expand(slots.shape)
        norm = self._tensor(LAST_NORM)
        own = rms_norm(batch.hidden[rows[there], slots[there]], norm.shape, norm, self.config.eps)
        far = smooth_l1_loss(out[there], own, reduction="none").mean(-1)
        far = (far * told.shares.expand(there.shape)[there]).sum()
        return told.unrolled(told.loss + _DISTANCE * far)

    def states(self, batch: Batch, steps: int) -> torch.Tensor:  # [rows, begins, steps, width]
        """What the head puts out at each slot of `batch.begins`, before the output matrix."""
        state = self._augmented(batch)
        out = [self._out(state, "clover_head_mlp")]
        last = batch.tokens.shape[1] - 1
        for step in range(1, steps):
            told = batch.tokens.gather(1, (batch.begins + step).clamp(max=last))
            state, seen = self._next(state, embedding(told, self._tensor(OUTPUT)), step)
            out.append(self._out(torch.cat((state, seen), -1), "clover_head_mlp2"))
        return torch.stack(out, 2)

    def logits(self, batch: Batch, steps: int) -> torch.Tensor:  # [rows, begins, steps, vocab]
        return self.states(batch, steps) @ self._tensor(OUTPUT).T

    def _next(
        self,
        state: torch.Tensor,  # [rows, begins, width]
        token: torch.Tensor,  # [rows, begins, width]
        step: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The state that has taken a token in, and what is seen of the token beside it."""
        return self._joined(state, token, LATER), token

    def _augmented(self, batch: Batch) -> torch.Tensor:  # [rows, begins, width]
        config, begins = self.config, batch.begins
        rows = torch.arange(begins.shape[0], device=begins.device)[:, None]
        x = self._joined(batch.hidden, embedding(batch.tokens, self._tensor(OUTPUT)), FIRST)
        positions = torch.arange(x.shape[1], device=x.device)
        cos, sin = (turn[:, :, None].float() for turn in self._rotary(x, positions[None]))
        for number in range(config.num_hidden_layers):
            layer = f"layers.{number}."
            normed = self._norm(x, layer + "input_layernorm")
            query, key, value = (
                self._by_head(self._linear(normed, f"{layer}self_attn.{letter}_proj"))
                for letter in "qkv"
            )
            query, key = rotated(query, (cos, sin)), rotated(key, (cos, sin))
            mask = (positions <= positions[:, None])[None, None]
            if number == config.num_hidden_layers - 1:  # only slots where drafts begin go on
                query, x = query[rows, begins], x[rows, begins]
                mask = (positions <= begins[..., None])[:, None]
            attended = scaled_dot_product_attention(
                query.transpose(1, 2).to(value.dtype),
                key.transpose(1, 2).to(value.dtype),
                value.transpose(1, 2),
                attn_mask=mask,
                scale=config.head_dim**-0.5,
                enable_gqa=True,
            )
            attended = attended.transpose(1, 2).flatten(2)
            x = x + self._linear(attended, f"{layer}self_attn.o_proj")
            y = self._norm(x, layer + "post_attention_layernorm")
            gate, up = (self._linear(y, f"{layer}mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._linear(silu(gate) * up, f"{layer}mlp.down_proj")
        return self._norm(x, "clover_norm")

    def _joined(self, x: torch.Tensor, token: torch.Tensor, name: str) -> torch.Tensor:
        """x + cos(q, k) v by head, where q comes of x, k and v of the token; [..., width] each."""
        query = self._linear(self._norm(x, f"{name}.input_layernorm"), f"{name}.q")
        key, value = (self._linear(token, f"{name}.{letter}") for letter in "kv")
        heads = self.config.num_attention_heads
        query, key, value = (part.view(*part.shape[:-1], heads, -1) for part in (query, key, value))
        likeness = cosine_similarity(query.float(), key.float(), dim=-1, eps=self.config.eps)
        joined: torch.Tensor = likeness[..., None] * value
        return x + joined.flatten(-2)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:  # [rows, slots, heads, head_dim]
        return x.view(*x.shape[:-1], -1, self.config.head_dim)

    def _out(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._norm(self._linear(x, name), "clover_head_norm")
