"""A DSpark head that learns: blocks of drafts at some slots of whole conversations, in one pass.

It computes what `replicas.drafters.one_pass` computes in serving. At slot i the anchor is the token
at i + 1; a block sees the target's hidden states up to slot i and itself, and its place k guesses
the token at i + 2 + k. The Markov head is told the tokens of the text (teacher forcing). The
confidence head learns whether a draft equals the target's choice where all before it do, which is
what acceptance in serving is; it changes nothing of what is drafted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, embedding, linear, silu
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from replicas.drafters import MASK, OnePassConfig
from replicas.training.methods.head import Batch, TrainableHead, Unrolled, rotated

EVERY = 4
"""A block begins at one slot of so many; at others in the next update."""


class DSparkHead(TrainableHead):
    """Full attention in every layer, a slot for the anchor, a mask vector, a plain Markov head."""

    config: OnePassConfig

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rotary: Any = Qwen3RotaryEmbedding(self.config.layer)

    def forward(self, batch: Batch, step_weights: tuple[float, ...], at: int = 0) -> Unrolled:
        """`step_weights` are as many as a block has places."""
        most = batch.begins.shape[1]
        every = min(EVERY, most)  # of short conversations a block begins somewhere, too
        chosen = torch.arange(at % every, most, every, device=batch.tokens.device)
        anchors = batch.begins[:, chosen]
        hidden = self.blocks(batch, anchors)[:, :, : len(step_weights)]
        markov = self._markov(batch, anchors, len(step_weights))
        matrices = (self._weight("lm_head"), self._weight("markov_head.markov_w2"))
        told = self._told(
            batch,
            chosen,
            torch.cat((hidden, markov), -1),
            torch.cat(matrices, 1),
            step_weights,
            fixed=self.config.hidden_size,
        )
        doubt = binary_cross_entropy_with_logits(
            self._confidence(hidden.detach(), markov.detach())[told.reached],
            told.hits[told.reached].float(),
            told.shares.expand(told.hits.shape)[told.reached],
            reduction="sum",
        )
        return told.unrolled((told.loss + doubt) * every)

    def blocks(
        self,
        batch: Batch,
        anchors: torch.Tensor,  # [rows, n], int64: slots
    ) -> torch.Tensor:  # [rows, n, places, width]
        """What each block puts out before the output matrix."""
        config, places = self.config, self.config.block_size
        rows, n = anchors.shape
        slots = torch.arange(batch.tokens.shape[1], device=anchors.device)
        ahead = torch.arange(places, device=anchors.device)
        context = self._norm(self._linear(batch.hidden, "fc"), "hidden_norm")
        first = embedding(batch.tokens.gather(1, anchors), self._weight("embed_tokens"))
        masks = self._tensor(MASK).expand(rows, n, places - 1, -1)
        x = torch.cat((first[:, :, None], masks), 2)
        # Slot i has position i in the context; an anchor there is the token at i + 1.
        of_context = self._turns(x, slots[None])
        of_block = self._turns(x, (anchors[..., None] + 1 + ahead).view(rows, -1))
        unseen = (slots > anchors[..., None])[:, None, None, :, None]  # [rows, 1, 1, n, 1, slots]
        for number in range(config.num_hidden_layers):
            layer = f"layers.{number}."
            attended = self._attend(layer, x, context, of_context, of_block, unseen)
            x = x + self._linear(attended, layer + "self_attn.o_proj")
            y = self._norm(x, layer + "post_attention_layernorm")
            gate, up = (self._linear(y, f"{layer}mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._linear(silu(gate) * up, layer + "mlp.down_proj")
        return self._norm(x, "norm")

    def logits(self, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        """Of each place, told the tokens of the text, [rows, n, places, vocab]."""
        hidden = self.blocks(batch, anchors)
        markov = self._markov(batch, anchors, self.config.block_size)
        return self._linear(hidden, "lm_head") + self._linear(markov, "markov_head.markov_w2")

    def confidence(self, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        """The chance of each place that it is right if all before it are, [rows, n, places]."""
        markov = self._markov(batch, anchors, self.config.block_size)
        return self._confidence(self.blocks(batch, anchors), markov).sigmoid()

    def _markov(
        self, batch: Batch, anchors: torch.Tensor, places: int
    ) -> torch.Tensor:  # [rows, n, places, rank]
        """Of the token before each place."""
        ahead = torch.arange(places, device=anchors.device)
        before = (anchors[..., None] + ahead).clamp(max=batch.tokens.shape[1] - 1)
        tokens = batch.tokens.gather(1, before.flatten(1)).view_as(before)
        return embedding(tokens, self._weight("markov_head.markov_w1"))

    def _confidence(
        self, hidden: torch.Tensor, markov: torch.Tensor
    ) -> torch.Tensor:  # [rows, n, places], float32
        seen = torch.cat((hidden, markov), -1).float()
        weight, bias = (self._tensor(f"confidence_head.proj.{part}") for part in ("weight", "bias"))
        with torch.autocast(seen.device.type, enabled=False):
            sure: torch.Tensor = linear(seen, weight, bias).squeeze(-1)
            return sure

    def _attend(
        self,
        layer: str,
        x: torch.Tensor,  # [rows, n, places, width]
        context: torch.Tensor,  # [rows, slots, width]
        of_context: tuple[torch.Tensor, torch.Tensor],
        of_block: tuple[torch.Tensor, torch.Tensor],
        unseen: torch.Tensor,  # [rows, 1, 1, n, 1, slots], bool
    ) -> torch.Tensor:  # [rows, n, places, heads * head_dim]
        rows, n, places, _ = x.shape
        groups = self.config.num_key_value_heads
        normed = self._norm(x, layer + "input_layernorm").view(rows, n * places, -1)
        query, own_key, own_value = (self._heads(normed, layer, of, of_block) for of in "qkv")
        key, value = (self._heads(context, layer, of, of_context) for of in "kv")
        # Heads that share keys stand together: [rows, kv_heads, heads each, n, places, head_dim].
        query = query.view(rows, groups, -1, n, places, query.shape[-1])
        own_key, own_value = (
            part.view(rows, groups, 1, n, places, -1) for part in (own_key, own_value)
        )
        key, value = (part[:, :, None, None] for part in (key, value))
        far = (query @ key.transpose(-1, -2)).float().masked_fill(unseen, -torch.inf)
        near = (query @ own_key.transpose(-1, -2)).float()
        scores = torch.cat((far, near), -1) * self.config.head_dim**-0.5
        shares = scores.softmax(-1).to(value.dtype)
        slots = key.shape[-2]
        out = shares[..., :slots] @ value + shares[..., slots:] @ own_value
        by_head: torch.Tensor = out.view(rows, -1, n, places, out.shape[-1])
        return by_head.permute(0, 2, 3, 1, 4).flatten(3)

    def _heads(
        self, x: torch.Tensor, layer: str, letter: str, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:  # [rows, heads, tokens, head_dim]
        x = self._linear(x, f"{layer}self_attn.{letter}_proj")
        x = x.view(*x.shape[:2], -1, self.config.head_dim)
        if letter != "v":
            x = rotated(self._norm(x, f"{layer}self_attn.{letter}_norm"), turns)
        return x.transpose(1, 2)

    def _turns(
        self, like: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # [rows, tokens, 1, head_dim] each
        cos, sin = self._rotary(like, positions)
        return cos[:, :, None].float(), sin[:, :, None].float()
