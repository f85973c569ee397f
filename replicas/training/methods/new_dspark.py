"""A new DSpark head: its config for a target, and weights from the target's last layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from replicas.drafters import MASK, OnePassConfig, one_pass_config
from replicas.training.methods.dspark import DSparkHead
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

LAYERS = 2
_OWN = ("lm_head.weight", MASK)
"""Beside the layers: tensors that the format may leave out."""


class DSparkMethod:
    name, title = "dspark", "a DSpark head"
    unroll, step_weight, speculators = 7, 0.8, True

    def aux_layers(self, layers: int) -> tuple[int, ...]:
        """Those of an EAGLE-3 head, so that both are trained on the same features."""
        return aux_layers(layers)

    def settings(self, target: Any, draft_vocab: int, intermediate_size: int) -> dict[str, Any]:
        """In the speculators format."""
        kv_heads = int(getattr(target, "num_key_value_heads", None) or target.num_attention_heads)
        width = int(target.hidden_size)
        settings = {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "transformer_layer_config": layer_settings(
                target, "qwen3", LAYERS, kv_heads, intermediate_size
            ),
            "draft_vocab_size": draft_vocab,
            "target_hidden_size": width,
            "block_size": self.unroll,
            "sample_from_anchor": True,
            "aux_hidden_state_layer_ids": list(aux_layers(int(target.num_hidden_layers))),
            "markov_rank": max(8, min(256, width // 8)),
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
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
        """The context begins as the last of the hidden states; layers as the target's last ones
        where shapes fit; the Markov head adds nothing yet."""
        config = _config(settings, target.config)
        made = random_tensors(config.tensors, seed)
        width, embeddings = config.hidden_size, input_rows(target)
        made["fc.weight"][:, -width:] += torch.eye(width)
        for number in range(config.num_hidden_layers):
            layer = f"layers.{number}."
            for name, value in layer_weights(target, config.num_hidden_layers - number).items():
                if layer + name in made and made[layer + name].shape == value.shape:
                    made[layer + name] = value
        last = last_norm(target)
        if last is not None:
            made["norm.weight"] = last
        made[MASK] = embeddings.mean(0)
        rank = config.markov_rank
        made["markov_head.markov_w1.weight"] *= rank**-0.5 / 0.02
        made["markov_head.markov_w2.weight"].zero_()
        frozen = {"lm_head.weight": output_rows(target, ids), "embed_tokens.weight": embeddings}
        del made["lm_head.weight"]
        return Weights(made, frozen)

    def head(
        self, settings: dict[str, Any], target: Any, weights: Weights, ids: torch.Tensor
    ) -> TrainableHead:
        return DSparkHead(_config(settings, target), weights.tensors, weights.frozen, ids)


def _config(settings: dict[str, Any], target: Any) -> OnePassConfig:
    with made_for("DSpark head"):
        return one_pass_config(settings, _OWN, target)
