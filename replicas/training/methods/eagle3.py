"""An EAGLE-3 head that learns: its forward pass over whole conversations, unrolled.

It computes what `replicas.drafters.eagle3.layer` computes in serving. At slot i it sees the token
at i + 1 beside the target's hidden states at i, and guesses the token at i + 2. In step j of the
unrolled pass (test-time training) it has drafted j tokens: it sees its own output at slot i - 1
instead, and attends to the target's states up to slot i - j and to its own ones behind them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding, linear, pad, silu
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from replicas.drafters import LAYER, Eagle3Config
from replicas.training.methods.head import Batch, TrainableHead, Unrolled, rotated
from replicas.training.methods.loss import soft_cross_entropy

_ATTENTION, _MLP = LAYER + "self_attn.", LAYER + "mlp."
EMBEDDINGS = "embed_tokens"
"""The target's, beside the head's own weights."""


class Eagle3Head(TrainableHead):
    config: Eagle3Config

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rotary: Any = LlamaRotaryEmbedding(self.config.layer)
        self._scale = self.config.head_dim**-0.5

    def forward(self, batch: Batch, step_weights: tuple[float, ...], at: int = 0) -> Unrolled:
        own, chances, best = self._targets(batch)

        device = batch.tokens.device
        rows = torch.arange(batch.tokens.shape[0], device=device)[:, None]
        embedded = self._norm(
            embedding(batch.tokens, self._weight(EMBEDDINGS)), LAYER + "input_layernorm"
        )
        fused = self._fused(batch.hidden)
        slots = batch.tokens.shape[1]
        positions = torch.arange(slots, device=device)
        cos, sin = self._rotary(fused, positions[None])
        cos, sin = cos[0][:, None].float(), sin[0][:, None].float()  # [slots, 1, head_dim]

        # Queries are needed where drafts begin only; the target's keys and values everywhere.
        begins = batch.begins
        part, turn = embedded[rows, begins], (cos[begins], sin[begins])
        normed = self._norm(fused, LAYER + "hidden_norm")
        first_key, first_value = self._keys_values(embedded, normed, (cos, sin))
        of_embedded = {letter: self._half(part, letter, 0) for letter in "qkv"}
        hidden = fused[rows, begins]
        own_states: list[tuple[torch.Tensor, torch.Tensor]] = []
        loss = fused.new_zeros(())
        losses, counts, right = [], [], []
        guesses, earlier = batch.guesses, batch.guesses
        accepted = []
        for step, weight in enumerate(step_weights):
            if step:
                hidden = pad(hidden, (0, 0, 1, 0))[:, :-1]
                guesses = guesses & pad(guesses, (1, 0))[:, :-1]
            normed = self._norm(hidden, LAYER + "hidden_norm")
            query = rotated(
                self._heads(of_embedded["q"] + self._half(normed, "q", 1), "q_norm"), turn
            )
            if step:
                key, value = (
                    self._heads(
                        of_embedded[letter] + self._half(normed, letter, 1),
                        "k_norm" if letter == "k" else "",
                    )
                    for letter in "kv"
                )
                own_states.append((rotated(key, turn), value))
            attended = self._attend(query, first_key, first_value, own_states, begins, positions)
            residual = normed if self.config.norm_before_residual else hidden
            x = self._linear(attended, _ATTENTION + "o_proj") + residual
            y = self._norm(x, LAYER + "post_attention_layernorm")
            gate, up = self._linear(y, _MLP + "gate_proj"), self._linear(y, _MLP + "up_proj")
            x = self._linear(silu(gate) * up, _MLP + "down_proj") + x
            out = self._norm(x, "norm")
            hidden = out if self.config.norm_output else x

            sums, guessed, _ = soft_cross_entropy(
                out[guesses], self._weight("lm_head"), own[guesses], chances[guesses]
            )
            loss = loss + weight * sums
            hit = torch.zeros_like(guesses)
            hit[guesses] = guessed == best[guesses]
            earlier = hit if step == 0 else hit & pad(earlier, (1, 0))[:, :-1]
            losses.append(sums.detach())
            counts.append(guesses.sum())
            right.append(hit)
            accepted.append(earlier.sum())
        return Unrolled(
            loss,
            torch.stack(losses),
            torch.stack(counts),
            torch.stack(right),
            torch.stack(accepted),
        )

    def _attend(
        self,
        query: torch.Tensor,  # [rows, begins, heads, head_dim]
        first_key: torch.Tensor,  # [rows, slots, kv_heads, head_dim]
        first_value: torch.Tensor,
        own_states: list[tuple[torch.Tensor, torch.Tensor]],  # each [rows, begins, kv_heads, dim]
        begins: torch.Tensor,  # [rows, begins]
        positions: torch.Tensor,  # [slots]
    ) -> torch.Tensor:  # [rows, begins, heads * head_dim]
        steps, scale = len(own_states), self._scale
        query = query.transpose(1, 2)
        keys, values = self._repeated(first_key), self._repeated(first_value)
        hidden = positions > (begins - steps)[..., None]
        scores = (query @ keys.transpose(2, 3)).float() * scale
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        behind = []
        for number, (key, value) in enumerate(own_states, 1):
            # The state of step `number` at this query's slot - steps + number.
            shift = steps - number
            shifted = [
                self._repeated(pad(state, (0, 0, 0, 0, shift, 0))[:, : state.shape[1]])
                for state in (key, value)
            ]
            own = (query * shifted[0]).float().sum(-1, keepdim=True) * scale
            scores = torch.cat((scores, own), -1)
            behind.append(shifted[1])
        shares = scores.softmax(-1).to(values.dtype)
        slots = keys.shape[2]
        out: torch.Tensor = shares[..., :slots] @ values
        for number, value in enumerate(behind):
            out = out + shares[..., slots + number, None] * value
        return out.transpose(1, 2).flatten(2)

    def _keys_values(
        self,
        embedded: torch.Tensor,  # [rows, slots, width]
        normed: torch.Tensor,
        at: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat((embedded, normed), -1)
        key = self._heads(self._linear(both, _ATTENTION + "k_proj"), "k_norm")
        value = self._heads(self._linear(both, _ATTENTION + "v_proj"), "")
        return rotated(key, at), value

    def _fused(self, hidden: torch.Tensor) -> torch.Tensor:
        width = self.config.target_width
        if self.config.fc_norm:
            parts = [
                self._norm(states, f"fc_norm.{index}")
                for index, states in enumerate(torch.split(hidden, width, -1))
            ]
            hidden = torch.cat(parts, -1)
        if self.config.norm_before_fc:
            hidden = self._norm(hidden, "input_norm")
        return self._linear(hidden, "fc")

    def _heads(self, x: torch.Tensor, norm: str) -> torch.Tensor:  # [rows, slots, heads, head_dim]
        x = x.view(*x.shape[:-1], -1, self.config.head_dim)
        if norm and self.config.layer.model_type == "qwen3":
            x = self._norm(x, _ATTENTION + norm)
        return x

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:  # [rows, heads, slots, head_dim]
        config = self.config
        groups = config.num_attention_heads // config.num_key_value_heads
        return x.transpose(1, 2).repeat_interleave(groups, 1)

    def _half(self, x: torch.Tensor, letter: str, number: int) -> torch.Tensor:
        """What one half of a projection's input adds: the embedding's, with the bias, or the hidden
        state's."""
        name = f"{_ATTENTION}{letter}_proj"
        weight = self._weight(name).chunk(2, 1)[number]
        return linear(x, weight, None if number else self._bias(name))
