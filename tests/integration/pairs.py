"""A tiny random pair with a tokenizer, written to a directory as transformers would find it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.cluster.fakes import EOS, VOCAB, tokenizer
from tests.tiny_pairs import SHAPE


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
