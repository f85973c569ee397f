"""An EAGLE-3 head that learns: its forward pass over whole conversations, unrolled.

It computes what `replicas.drafters.eagle3.layer` computes in serving. At slot i it sees the token
at i + 1 beside the target's hidden states at i, and guesses the token at i + 2. In step j of the
unrolled pass (test-time training) it has drafted j tokens: it sees its own output at slot i - 1
instead, and attends to the target's states up to slot i - j and to its own ones behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear, pad, rms_norm, silu
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from replicas.drafters import LAYER, Eagle3Config
from replicas.training.loss import soft_cross_entropy

_ATTENTION, _MLP = LAYER + "self_attn.", LAYER + "mlp."


@dataclass(frozen=True)
class Batch:
    """Conversations side by side. Of each the slots [0, lengths) are its own; those of `answers`
    are where the head guesses."""

    tokens: torch.Tensor  # [rows, slots], int64: at slot i the token at i + 1
    hidden: torch.Tensor  # [rows, slots, aux layers * target's width]
    answers: torch.Tensor  # [rows, answer], int64: slots, rising; the last one repeated at the end
    guesses: torch.Tensor  # [rows, answer], bool: no repetition
    likely: torch.Tensor  # [rows, answer, n], int64: ids of the target's likeliest tokens at i + 2
    chances: torch.Tensor  # [rows, answer, n], float32: their probabilities

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True)
class Unrolled:
    """What came of a batch."""

    loss: torch.Tensor
    """Sum over slots and steps, weighted."""
    losses: torch.Tensor  # [steps]: sums over slots, without gradient
    slots: torch.Tensor  # [steps]: how many
    right: torch.Tensor  # [steps, rows, answer], bool
    """Whether the likeliest token of the head is the target's."""
    accepted: torch.Tensor  # [steps]
    """In how many slots the drafts up to this step are all right, of a draft that began j slots
    before in step j."""


class TrainableHead(nn.Module):
    embeddings: torch.Tensor
    ids: torch.Tensor
    own_ids: torch.Tensor
    """By the target's id: the head's, or -1."""

    def __init__(
        self,
        config: Eagle3Config,
        tensors: dict[str, torch.Tensor],
        ids: torch.Tensor,  # [draft vocabulary], int64: the target's ids, rising
        embeddings: torch.Tensor,  # [target's vocabulary, width]
    ) -> None:
        super().__init__()
        self.config = config
        self.weights = nn.ParameterDict(
            {_key(name): nn.Parameter(value.float().clone()) for name, value in tensors.items()}
        )
        self.register_buffer("embeddings", embeddings.detach().float(), persistent=False)
        of_target = torch.full((config.target_vocab,), -1, dtype=torch.int64)
        of_target[ids] = torch.arange(len(ids))
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("own_ids", of_target, persistent=False)
        self._rotary: Any = LlamaRotaryEmbedding(config.layer)
        self._scale = config.head_dim**-0.5

    @property
    def _found(self) -> dict[str, torch.Tensor]:
        return {_name(key): value for key, value in self.weights.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """As `Eagle3Config.tensors` names them."""
        return {_name(key): value.detach() for key, value in self.weights.items()}

    def forward(self, batch: Batch, step_weights: tuple[float, ...]) -> Unrolled:
        """One step for each weight."""
        own = self.own_ids[batch.likely]
        chances = batch.chances.masked_fill(own < 0, 0.0)
        own = own.clamp(min=0)
        best = self.own_ids[batch.likely[..., 0]]

        device = batch.tokens.device
        rows = torch.arange(batch.tokens.shape[0], device=device)[:, None]
        embedded = self._norm(embedding(batch.tokens, self.embeddings), LAYER + "input_layernorm")
        fused = self._fused(batch.hidden)
        slots = batch.tokens.shape[1]
        positions = torch.arange(slots, device=device)
        cos, sin = self._rotary(fused, positions[None])
        cos, sin = cos[0][:, None].float(), sin[0][:, None].float()  # [slots, 1, head_dim]

        # Queries are needed in the answers only; keys and values of the target's states everywhere.
        answers = batch.answers
        part, at = embedded[rows, answers], (cos[answers], sin[answers])
        normed = self._norm(fused, LAYER + "hidden_norm")
        first_key, first_value = self._keys_values(embedded, normed, (cos, sin))
        of_embedded = {letter: self._half(part, letter, 0) + self._bias(letter) for letter in "qkv"}
        hidden = fused[rows, answers]
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
            query = self._rotated(
                self._heads(of_embedded["q"] + self._half(normed, "q", 1), "q_norm"), at
            )
            if step:
                key, value = (
                    self._heads(
                        of_embedded[letter] + self._half(normed, letter, 1),
                        "k_norm" if letter == "k" else "",
                    )
                    for letter in "kv"
                )
                own_states.append((self._rotated(key, at), value))
            attended = self._attend(query, first_key, first_value, own_states, answers, positions)
            residual = normed if self.config.norm_before_residual else hidden
            x = self._linear(attended, _ATTENTION + "o_proj") + residual
            y = self._norm(x, LAYER + "post_attention_layernorm")
            gate, up = self._linear(y, _MLP + "gate_proj"), self._linear(y, _MLP + "up_proj")
            x = self._linear(silu(gate) * up, _MLP + "down_proj") + x
            out = self._norm(x, "norm")
            hidden = out if self.config.norm_output else x

            sums, guessed = soft_cross_entropy(
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
        query: torch.Tensor,  # [rows, answer, heads, head_dim]
        first_key: torch.Tensor,  # [rows, slots, kv_heads, head_dim]
        first_value: torch.Tensor,
        own_states: list[tuple[torch.Tensor, torch.Tensor]],  # each [rows, answer, kv_heads, dim]
        answers: torch.Tensor,  # [rows, answer]
        positions: torch.Tensor,  # [slots]
    ) -> torch.Tensor:  # [rows, answer, heads * head_dim]
        steps, scale = len(own_states), self._scale
        query = query.transpose(1, 2)
        keys, values = self._repeated(first_key), self._repeated(first_value)
        hidden = positions > (answers - steps)[..., None]
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
        return self._rotated(key, at), value

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

    def _rotated(self, x: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * at[0] + torch.cat((-high, low), -1) * at[1]

    def _half(self, x: torch.Tensor, letter: str, number: int) -> torch.Tensor:
        """What one half of a projection's input adds: the embedding's, or the hidden state's."""
        weight = self._weight(f"{_ATTENTION}{letter}_proj")
        return linear(x, weight.chunk(2, 1)[number])

    def _bias(self, letter: str) -> torch.Tensor | float:
        return self._found.get(f"{_ATTENTION}{letter}_proj.bias", 0.0)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self._weight(name), self._found.get(f"{name}.bias"))

    def _weight(self, name: str) -> torch.Tensor:
        return self._found[f"{name}.weight"]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weight(name)
        return rms_norm(x.float(), weight.shape, weight, self.config.eps)


def _key(name: str) -> str:
    return name.replace(".", "/")


def _name(key: str) -> str:
    return key.replace("/", ".")
