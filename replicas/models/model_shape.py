"""The sizes of a model, of its weights too, as its config has them: no weights are read for it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.models.loader import dtype_of


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides the size of its KV cache and of its passes."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    """Width of the MLP; of all experts that see one token together, if that is wider."""
    vocab: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        heads = config.num_attention_heads
        experts = (getattr(config, "num_experts_per_tok", None) or 0) * (
            getattr(config, "moe_intermediate_size", None) or 0
        )
        return cls(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden=config.hidden_size,
            intermediate=max(
                getattr(config, "intermediate_size", None) or 4 * config.hidden_size, experts
            ),
            vocab=config.vocab_size,
        )

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one position in one layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """(times, in, out) of the joined weights."""
        heads = self.heads * self.head_dim
        return [
            (self.layers, self.hidden, heads + self.kv_numbers),
            (self.layers, heads, self.hidden),
            (self.layers, self.hidden, 2 * self.intermediate),
            (self.layers, self.intermediate, self.hidden),
            (1, self.hidden, self.vocab),
        ]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers; tied parameters are one."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def without_storage(model_config: Any, config: ReplicaConfig) -> PreTrainedModel:
    """A model of sizes alone, whose config may be changed."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(model_config),
            dtype=dtype_of(config),
            trust_remote_code=config.trust_remote_code,
        )
    return model
