"""What of a pair's models must be known to plan memory; no weights are needed for it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.drafters.eagle3 import Head, HeadConfig
from replicas.models.pair import Pair, PairFiles, dtype_of, take_part


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
        """Read from a transformers config."""
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


@dataclass(frozen=True, slots=True)
class PairShape:
    """A target and maybe a draft model."""

    target: ModelShape
    draft: ModelShape | None
    target_bytes: int
    """Bytes of the weights, tied ones counted once."""
    draft_bytes: int
    context_len: int
    taps: int = 0
    """Hidden states of the target, per token, that a head takes."""

    @property
    def models(self) -> list[ModelShape]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def weights(self) -> int:
        return self.target_bytes + self.draft_bytes

    def block_bytes(self, block_size: int, item: int) -> int:
        """What one block costs over all layers of all models; a number has `item` bytes."""
        return sum(one.layers * one.kv_numbers for one in self.models) * block_size * item


def pair_shape(pair: Pair) -> PairShape:
    """Of models that are loaded."""
    return PairShape(
        target=ModelShape.of(pair.target.config),
        draft=None if pair.draft is None else ModelShape.of(pair.draft.config),
        target_bytes=weight_bytes(pair.target),
        draft_bytes=0 if pair.draft is None else weight_bytes(pair.draft),
        context_len=pair.context_len,
        taps=len(pair.draft.config.taps) if isinstance(pair.draft, Head) else 0,
    )


def pair_shape_of(files: PairFiles, config: ReplicaConfig) -> PairShape:
    """Of models whose weights have not been read; with `tensor_parallel` of what a rank holds.

    Raises PairRefused for a target that cannot be divided so.
    """
    target = without_storage(files.target_config, config)
    take_part(target, config, rank=0)
    of_draft, draft_bytes, taps = files.draft_config, 0, 0
    if isinstance(of_draft, HeadConfig):
        draft_bytes, taps = of_draft.numbers * target.dtype.itemsize, len(of_draft.taps)
    elif of_draft is not None:
        draft = without_storage(of_draft, config)
        of_draft, draft_bytes = draft.config, weight_bytes(draft)
    return PairShape(
        target=ModelShape.of(target.config),
        draft=None if of_draft is None else ModelShape.of(of_draft),
        target_bytes=weight_bytes(target),
        draft_bytes=draft_bytes,
        context_len=files.context_len,
        taps=taps,
    )


def weight_bytes(model: nn.Module | Head) -> int:
    """Bytes of parameters and buffers; tied parameters are one."""
    if isinstance(model, Head):
        return sum(tensor.nbytes for tensor in model.tensors.values())
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
