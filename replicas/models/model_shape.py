"""The sizes of a model, of its weights too, as its config has them: no weights are read for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.kv_cache import LayerShape, stores, uniform
from replicas.models.loader import dtype_of
from replicas.models.own_code.layer_reading import layers_of


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides the size of its KV cache and of its passes."""

    attention: tuple[LayerShape, ...]
    """Of each layer that attends."""
    hidden: int
    intermediate: int
    """Width of the MLP; of all experts that see one token together, if that is wider."""
    vocab: int
    products: tuple[tuple[int, int, int], ...]
    """(times, in, out) of the weights that tokens are multiplied with."""
    largest: int
    """Numbers of the largest weight; of all experts of a layer, if they have more."""

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Of a config of Llama-like layers, which all have the usual attention."""
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        hidden, inner = config.hidden_size, _intermediate(config)
        products = (
            (layers, hidden, (heads + 2 * kv_heads) * head_dim),
            (layers, heads * head_dim, hidden),
            (layers, hidden, 2 * inner),
            (layers, inner, hidden),
            (1, hidden, config.vocab_size),
        )
        attention = uniform(layers, heads, kv_heads, head_dim)
        largest = hidden * max(config.vocab_size, inner, heads * head_dim)
        return cls(attention, hidden, inner, config.vocab_size, products, largest)

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> ModelShape:
        """Of a model, which needs no storage; raises PairRefused for layers that are not served."""
        config = model.config.get_text_config()
        return cls(
            attention=layers_of(model),
            hidden=config.hidden_size,
            intermediate=_intermediate(config),
            vocab=config.vocab_size,
            products=tuple((1, fan_in, fan_out) for fan_in, fan_out in _products(model)),
            largest=max(
                sum(weight.numel() for weight in module.parameters(recurse=False))
                for module in model.modules()
            ),
        )

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one position, of all layers."""
        return sum(layer.kv_numbers for layer in stores(self.attention))

    @property
    def widest(self) -> LayerShape:
        """The layer whose attention takes most."""
        return max(self.attention, key=lambda layer: (layer.heads * layer.width, layer.kv_numbers))


def _intermediate(config: Any) -> int:
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if isinstance(inner, list | tuple):
        inner = max(inner)
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    experts = chosen * (getattr(config, "moe_intermediate_size", None) or 0)
    return max(int(inner), int(experts))


def _products(model: nn.Module) -> Iterator[tuple[int, int]]:
    """(in, out) of every matrix but the embedding's table."""
    for module in model.modules():
        for weight in () if isinstance(module, nn.Embedding) else module.parameters(recurse=False):
            if weight.dim() == 2:
                yield weight.shape[1], weight.shape[0]
            elif weight.dim() == 3:
                for _ in range(weight.shape[0]):
                    yield weight.shape[2], weight.shape[1]


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
