"""A small random model of each decoder that transformers knows and people serve, by its own config
class: four layers that show every kind of layer of the family, four experts, a window of 12."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.tiny_pairs import VOCAB

_NAMES = """
afmoe apertus arcee axk1 bamba biogpt bitnet bloom codegen cohere cohere2 cohere2_moe cwm
deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe
falcon falcon_h1 falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma4_text
gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox
gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder
jais2 jamba kimi_linear kolibri1 laguna lfm2 lfm3 llama llama4_text mellum mimo_v2_flash minicpm3
minimax minimax_m2 ministral ministral3 mistral mixtral mpt nanochat nemotron nemotron_h olmo
olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3 solar_open
stablelm starcoder2 vaultgemma xglm youtu"""
KINDS = _NAMES.split()
LAYERS, WINDOW = 4, 12
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "ffn_dim", "intermediate_size_mlp"), 96
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("mamba_d_state", "mamba_head_dim", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    "attention_dropout": 0.0,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "interleave_moe_layer_step": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "n_groups": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 16,
    "rotary_dim": 8,
    "sliding_window": WINDOW,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
}
_MIXED = ["linear_attention", "full_attention"] * 2
_LATENT = """deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa youtu kimi_linear axk1
minicpm3"""
_HYBRID = "qwen3_next qwen3_5_text qwen3_5_moe_text olmo_hybrid"
_WITHOUT_WINDOW = "qwen2 qwen3 qwen2_moe qwen3_moe smollm3"
_SPECIAL: dict[str, dict[str, Any]] = {
    **{kind: {"sliding_window": None} for kind in _WITHOUT_WINDOW.split()},
    **{kind: {"num_key_value_heads": 4} for kind in _LATENT.split()},
    **{kind: {"layer_types": _MIXED} for kind in _HYBRID.split()},
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neo": {
        "num_layers": LAYERS,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": WINDOW,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mimo_v2_flash": {"head_dim": 24},
}


def config_of(kind: str) -> Any:
    known = CONFIG_MAPPING[kind]().to_dict()
    given = {name: value for name, value in _SIZES.items() if name in known}
    given |= {"bos_token_id": 1, "eos_token_id": 2}
    if own := known.get("layer_types"):
        kinds = list(dict.fromkeys(own))
        given["layer_types"] = [*own[: LAYERS - 1], kinds[-1]]
        if set(given["layer_types"]) != set(kinds):
            given["layer_types"] = (kinds * LAYERS)[:LAYERS]
    return CONFIG_MAPPING[kind](**given | _SPECIAL.get(kind, {}))


@cache
def small_model(kind: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(kind)).float().eval()
        for weight in model.parameters():
            if weight.dim() > 1:  # more than usual, so that few choices are near ties
                torch.nn.init.normal_(weight, std=0.12)
    return model.requires_grad_(False)
