"""A new EAGLE-3 head: its config for a target, and weights from the target's last layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from replicas.drafters import LAYER, Eagle3Config, eagle3_config
from replicas.training.methods.eagle3 import EMBEDDINGS, Eagle3Head
from replicas.training.methods.head import TrainableHead
from replicas.training.methods.method import Weights
from replicas.training.methods.target import (
    aux_layers,
    input_rows,
    last_norm,
    layer_settings,
    layer_weights,
    made_for,
    output_rows,
    random_tensors,
)

_KINDS = {"llama": "llama", "qwen3": "qwen3"}
"""Layers that a head may have, by those of its target; llama for others."""


class Eagle3Method:
    name, title = "eagle3", "an EAGLE-3 head"
    unroll, step_weight, speculators = 4, 0.8, True

    def aux_layers(self, layers: int) -> tuple[int, ...]:
        return aux_layers(layers)

    def settings(self, target: Any, draft_vocab: int, intermediate_size: int) -> dict[str, Any]:
        """In the speculators format. As many key heads as query heads: the embedding of the last
        token reaches the head through its values alone."""
        kind = _KINDS.get(target.model_type, "llama")
        heads = int(target.num_attention_heads)
        settings = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer_settings(target, kind, 1, heads, intermediate_size),
            "draft_vocab_size": draft_vocab,
            "target_hidden_size": int(target.hidden_size),
            "norm_before_residual": True,
            "norm_before_fc": False,
            "fc_norm": True,
            "norm_output": False,
            "embed_requires_grad": False,
            "eagle_aux_hidden_state_layer_ids": list(aux_layers(int(target.num_hidden_layers))),
            "tie_word_embeddings": False,
        }
        _config(settings, target)
        return settings

    @torch.no_grad()
    def new(
        self,
        settings: dict[str, Any],
        target: PreTrainedModel,
        ids: torch.Tensor,
        typical: float,
        seed: int,
    ) -> Weights:
        """Of the target's last layer, norm and logits where their shapes fit, else random. The
        head's residual is normed, so what its layer adds is divided by what is typical."""
        config = _config(settings, target.config)
        made = random_tensors(config.tensors, seed)
        width = config.width
        # It begins with the last of the hidden states.
        made["fc.weight"][:, -width:] += torch.eye(width)
        found = layer_weights(target)
        norm = found.get("input_layernorm.weight", torch.ones(width))
        for letter in "qkv":
            theirs = found.get(f"self_attn.{letter}_proj.weight")
            ours = made[f"{LAYER}self_attn.{letter}_proj.weight"]
            if theirs is None or theirs.shape[1] != width or ours.shape[0] % theirs.shape[0]:
                continue
            groups = ours.shape[0] // theirs.shape[0]
            if groups > 1:  # every query head gets keys and values of its own
                by_head = theirs.view(-1, config.head_dim, width).repeat_interleave(groups, 0)
                theirs = by_head.reshape(-1, width)
            ours[:, width:] = theirs * norm
        for name, scale in (
            ("self_attn.o_proj.weight", 1 / typical),
            ("mlp.down_proj.weight", 1 / typical),
            ("mlp.gate_proj.weight", 1.0),
            ("mlp.up_proj.weight", 1.0),
            ("post_attention_layernorm.weight", 1.0),
            ("self_attn.q_norm.weight", 1.0),
            ("self_attn.k_norm.weight", 1.0),
        ):
            ours = made.get(LAYER + name, torch.empty(0))
            if name in found and found[name].shape == ours.shape:
                made[LAYER + name] = found[name] * scale
        last = last_norm(target)
        if last is not None:
            made["norm.weight"] = last
        made["lm_head.weight"] = output_rows(target, ids)
        return Weights(made, {f"{EMBEDDINGS}.weight": input_rows(target)})

    def head(
        self, settings: dict[str, Any], target: Any, weights: Weights, ids: torch.Tensor
    ) -> TrainableHead:
        return Eagle3Head(_config(settings, target), weights.tensors, weights.frozen, ids)


def _config(settings: dict[str, Any], target: Any) -> Eagle3Config:
    with made_for("EAGLE-3 head"):
        return eagle3_config(settings, (), target)
