"""A new Clover-2 head: its config for a target, and weights from the target's last layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from replicas.drafters import FIRST, LATER, CloverConfig, clover_config
from replicas.errors import TrainingRefused
from replicas.training.methods.clover import LAST_NORM, OUTPUT, CloverHead
from replicas.training.methods.head import TrainableHead
from replicas.training.methods.method import Weights
from replicas.training.methods.target import (
    last_norm,
    layer_settings,
    layer_weights,
    made_for,
    output_rows,
    random_tensors,
)

LAYERS = 2


class CloverMethod:
    name, title = "clover", "a Clover-2 head"
    unroll, step_weight, speculators = 5, 0.7, False

    def aux_layers(self, layers: int) -> tuple[int, ...]:
        return (layers,)

    def settings(self, target: Any, draft_vocab: int, intermediate_size: int) -> dict[str, Any]:
        kv_heads = int(getattr(target, "num_key_value_heads", None) or target.num_attention_heads)
        settings = {
            "architectures": ["CloverModel"],
            **layer_settings(target, "llama", LAYERS, kv_heads, intermediate_size),
            "clover": {"num_layers": LAYERS, "num_heads": self.unroll},
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
        """As Clover-2 begins: the augmenting layers as the target's last one, where shapes fit; the
        head puts out what they do; queries and keys of a regressive connection as they are, and
        values near nothing."""
        last = last_norm(target)
        if last is None:
            raise TrainingRefused(
                f"target: {type(target).__name__} has no last norm by the root mean square, and"
                " no Clover-2 head can be made for it"
            )
        config = _config(settings, target.config)
        made = random_tensors(config.tensors, seed)
        for number in range(config.num_hidden_layers):
            for name, value in layer_weights(target).items():
                name = f"layers.{number}.{name}"
                if name in made and made[name].shape == value.shape:
                    made[name] = value.clone()
        width = config.hidden_size
        one = torch.eye(width)
        made["clover_norm.weight"], made["clover_head_norm.weight"] = last.clone(), last.clone()
        made["clover_head_mlp.weight"] = one.clone()
        made["clover_head_mlp2.weight"] = torch.cat((one, torch.zeros(width, width)), 1)
        for block in (FIRST, LATER):
            for letter in "qk":
                made[f"{block}.{letter}.weight"] += one
        output = output_rows(target, torch.arange(target.config.vocab_size))
        return Weights(made, {OUTPUT: output, LAST_NORM: last})

    def head(
        self, settings: dict[str, Any], target: Any, weights: Weights, ids: torch.Tensor
    ) -> TrainableHead:
        return CloverHead(_config(settings, target), weights.tensors, weights.frozen, ids)


def _config(settings: dict[str, Any], target: Any) -> CloverConfig:
    with made_for("Clover-2 head"):
        return clover_config(settings, (), target)
