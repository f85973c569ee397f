"""The shapes of the pair, and how the target grows out of the draft. No data, no training.

The shallow model is trained first; the target is that model with layers appended whose output
projections are zero, so it starts as the same function. What the two learned together makes the
draft a far better guesser than a small model trained apart.
"""

import json
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from replicas.demo.tokens import CONTEXT, VOCAB_SIZE

DRAFT_LAYERS = 2  # copying from earlier text (induction) takes two attention layers
TARGET_LAYERS = 14  # so that the draft's forward stays well below a fifth of the target's


def new_model(layers: int, eos_id: int) -> LlamaForCausalLM:
    """A model with random weights from torch's global generator."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def grow(shallow: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A deeper model that computes the same function as `shallow`, ready to be trained on."""
    deep = new_model(layers, shallow.config.eos_token_id)
    deep.load_state_dict(shallow.state_dict(), strict=False)
    for layer in deep.model.layers[shallow.config.num_hidden_layers :]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return deep


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Store float16 weights in a directory that loads as float32."""
    eos_id = model.config.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=eos_id, do_sample=False)
    half = LlamaForCausalLM(model.config).half()
    half.load_state_dict(model.state_dict())
    half.generation_config = model.generation_config
    half.save_pretrained(directory)
    # float16 halves the bytes; arithmetic on a CPU wants float32, and exactness is defined there.
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
