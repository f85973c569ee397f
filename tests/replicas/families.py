"""Tiny random models of families whose layers need more than the usual attention: for the tests of
what is read from a model, of the check at load and of bits."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from replicas.pair import Pair
from tests.tiny_pairs import VOCAB, pair_of

WINDOW = 12
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_WINDOWS = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {**_WINDOWS, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 16},
    "gemma4_text": {
        **_WINDOWS,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "gpt_oss": {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "mimo_v2_flash": {
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "head_dim": 24,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "moe_layers": [1],
    },
}


def drawn_model(kind: str, **settings: Any) -> PreTrainedModel:
    """Random weights of a family's small form, with these settings; the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = CONFIG_MAPPING[kind](**{**_SIZES, **FAMILIES[kind], **settings})
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
            elif "sink" in name or "bias" in name:
                torch.nn.init.normal_(parameter)
    return model.requires_grad_(False)


_made = cache(drawn_model)


def family_model(kind: str) -> PreTrainedModel:
    """A copy, which a test may change."""
    return copy.deepcopy(_made(kind))


@cache
def family_pair(kind: str) -> Pair:
    """Its draft is the target with noise."""
    return pair_of(_made(kind), kind)
