"""Tiny random pairs that stand for the supported architectures; the draft is a perturbed copy.

The copy makes the draft agree with the target often but not always, so that a test sees accepted
and rejected tokens alike.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from functools import cache

import torch
from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from replicas.config import ReplicaConfig
from replicas.cuda import GraphedModel
from replicas.drafters import Drafter
from replicas.drafters.model import ModelSource
from replicas.models import device_attention as attention
from replicas.models.paged_model import ATTENTION, PagedModel
from replicas.pair import Pair
from replicas.replica import Replica
from tests.gathering import GatherBackend

if os.environ.get("LOCKSTEP_TEST_DEVICE", "cpu") == "cpu":
    attention.PagedBackend = GatherBackend  # type: ignore[misc]

VOCAB = 97
DEVICE = os.environ.get("LOCKSTEP_TEST_DEVICE", "cpu")
"""Of the oracle's replicas: `cuda:0` on a machine with a GPU."""
FEW_KINDS = {} if DEVICE == "cpu" else {"plan_rows": 8, "plan_draft_len": 4}
"""A GPU records passes of few kinds, so that loading is quick; others run as they are."""
ARCHITECTURES = ("llama", "qwen3", "glm4")

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def random_model(architecture: str) -> PreTrainedModel:
    """Of torch's random state, on its default device."""
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE))
    if architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    return Glm4ForCausalLM(Glm4Config(**SHAPE))


@cache
def target_model(architecture: str) -> PreTrainedModel:
    """The target as transformers serves it, for reference runs."""
    with torch.random.fork_rng():
        torch.manual_seed(ARCHITECTURES.index(architecture))
        return random_model(architecture).eval()


@cache
def tiny_pair(architecture: str) -> Pair:
    """A pair whose draft is the target with noise."""
    return pair_of(target_model(architecture), architecture)


def pair_of(model: PreTrainedModel, name: str) -> Pair:
    """A copy of a model and, as its draft, another one with noise."""
    target = copy.deepcopy(model)
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.numel() > 1:
                parameter.add_(noise * parameter.std() * 0.05)
    for either in (target, draft):
        either.set_attn_implementation(ATTENTION)
        either.eval().to(DEVICE)
    return Pair(
        target=target,
        draft=ModelSource(f"{name}, perturbed", draft, VOCAB),
        context_len=256,
        vocab_size=VOCAB,
        target_name=name,
        device=torch.device(DEVICE),
        dtype=torch.float32,
    )


def pair_in(dtype: torch.dtype, architecture: str = "llama") -> Pair:
    """A copy of the tiny pair in this dtype."""
    pair = copy.deepcopy(tiny_pair(architecture))
    assert isinstance(pair.draft, ModelSource)
    for model in (pair.target, pair.draft.model):
        model.to(dtype)
    return dataclasses.replace(pair, dtype=dtype)


def unrecorded(model: PagedModel | GraphedModel) -> PagedModel:
    """A GPU has recordings before it."""
    return model.model if isinstance(model, GraphedModel) else model


def tiny_replica(architecture: str, drafter: Drafter | None = None, **config: object) -> Replica:
    """A replica of a tiny pair; blocks of 4 positions, so that rows cross block borders often."""
    settings = {
        "block_size": 4,
        "num_gpu_blocks_override": 2048,
        "device": DEVICE,
        **FEW_KINDS,
        **config,
    }
    return Replica(tiny_pair(architecture), ReplicaConfig(**settings), drafter=drafter)
