"""Tiny models with layers of two kinds, windows and whole texts, and replicas of them: their
windows are shorter than their texts."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.shared.oracle import OracleDrafter
from replicas.config import ReplicaConfig
from replicas.drafters.model import ModelSource
from replicas.memory import MemoryPlan
from replicas.pair import Pair
from replicas.replica import Replica
from tests.replicas.families import _SIZES, drawn_model
from tests.tiny_pairs import DEVICE, FEW_KINDS, VOCAB

WINDOW = 12
CONTEXT = 256
LAYERS = {
    "gemma3_text": ["sliding_attention"] * 5 + ["full_attention"],
    "gpt_oss": ["sliding_attention", "full_attention"] * 2,
    "llama4_text": ["chunked_attention"] * 3 + ["full_attention"],
    "mistral": ["sliding_attention"] * 3,
}
"""Of each family, the kinds of its layers."""


@cache
def windowed_model(kind: str) -> PreTrainedModel:
    """As transformers serves it, for reference runs."""
    layers = LAYERS[kind]
    settings: dict[str, Any] = {"num_hidden_layers": len(layers)}
    if kind != "mistral":
        settings["layer_types"] = layers
    if kind == "llama4_text":
        settings |= {"no_rope_layers": [1, 1, 1, 0], "moe_layers": [1]}
    return drawn_model(kind, **settings)


def windowed_pair(kind: str) -> Pair:
    """Without a drafter."""
    target = copy.deepcopy(windowed_model(kind)).to(DEVICE)
    return Pair(
        target=target,
        draft=None,
        context_len=CONTEXT,
        vocab_size=VOCAB,
        target_name=kind,
        device=torch.device(DEVICE),
        dtype=torch.float32,
    )


def drafted_pair(kind: str) -> Pair:
    """With a draft model of one layer, which has keys and values in the target's blocks."""
    config = {**_SIZES, "num_hidden_layers": 1}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        draft = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**config))
    draft = draft.float().eval().requires_grad_(False).to(DEVICE)
    return replace(windowed_pair(kind), draft=ModelSource("one layer", draft, VOCAB))


def windowed_replica(
    pair: Pair, drafter: OracleDrafter | None = None, plan: MemoryPlan | None = None, **config: Any
) -> Replica:
    """With blocks of 4 positions, so that rows cross block borders often."""
    settings = {
        "block_size": 4,
        "num_gpu_blocks_override": 512,
        "device": DEVICE,
        "prefill_chunk_tokens": 32,
        **FEW_KINDS,
        **config,
    }
    return Replica(pair, ReplicaConfig(**settings), plan, drafter)
