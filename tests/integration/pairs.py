"""A tiny random pair with a tokenizer, written to a directory as transformers would find it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.cluster.fakes import EOS, VOCAB, tokenizer
from tests.tiny_pairs import SHAPE


def pair_settings(target: Path, draft: Path, blocks: int = 1400) -> dict[str, Any]:
    """Of a replica that serves them; a block takes 12 KiB."""
    return {
        "target": str(target),
        "speculative_config": {"method": "draft_model", "model": str(draft)},
        "num_gpu_blocks_override": blocks,
    }


def pair_flags(target: Path, draft: Path, blocks: int) -> list[str]:
    """The same for a command line."""
    settings = pair_settings(target, draft, blocks)
    drafting = json.dumps(settings["speculative_config"])
    return [
        *("--target", settings["target"], "--speculative-config", drafting),
        *("--num-gpu-blocks-override", str(blocks)),
    ]


def write_pair(directory: Path, positions: int = 512, seed: int = 7) -> tuple[Path, Path]:
    """(target, draft); the draft is a perturbed copy, so that acceptance is neither 0 nor 1."""
    encoder = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), bos_token="<s>", eos_token="</s>"
    )
    own = {"vocab_size": VOCAB, "max_position_embeddings": positions}
    config = LlamaConfig(**SHAPE | own | {"bos_token_id": 0, "eos_token_id": EOS})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = LlamaForCausalLM(config)
        draft = LlamaForCausalLM(config)
        draft.load_state_dict(target.state_dict())
        for parameter in draft.parameters():
            parameter.data += 0.04 * parameter.data.std() * torch.randn_like(parameter)
    paths = directory / "target", directory / "draft"
    for model, path in zip((target, draft), paths, strict=True):
        model.save_pretrained(path)
        encoder.save_pretrained(path)
    return paths
