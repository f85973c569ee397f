"""Prompts for benchmarks: a file of Spec-Bench's form, or held-out text of the demo pair."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.prompts import read_prompts

LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256)


def held_out_tokens(
    tokenizer: Any, n: int, lengths: Sequence[int] = LENGTHS, seed: int = 0
) -> list[list[int]]:
    """n prompts of mixed length cut from text that the demo pair was not trained on."""
    from replicas.demo.corpus import build_corpus

    rng = random.Random(seed)
    texts = [document.text for document in build_corpus().held_out]
    documents = [
        tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in texts
    ]
    longest = max(map(len, documents))
    if longest < max(lengths):
        raise ValueError(f"the longest held-out document has only {longest} tokens")
    prompts: list[list[int]] = []
    while len(prompts) < n:  # several pieces of one document, at different places
        wanted = lengths[len(prompts) % len(lengths)]
        tokens = rng.choice(documents)
        if len(tokens) >= wanted:
            begin = rng.randrange(len(tokens) - wanted + 1)
            prompts.append(tokens[begin : begin + wanted])
    return prompts


def benchmark_tokens(tokenizer: Any, n: int, file: Path | None, tokens_max: int) -> list[list[int]]:
    """n tokenized prompts from `file`, or held-out text; cut to tokens_max."""
    if file is None:
        return held_out_tokens(tokenizer, n)
    texts = read_prompts(file, n)
    return [tokenizer(text).input_ids[:tokens_max] for text in texts]
