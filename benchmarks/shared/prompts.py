"""Prompts for benchmarks: a file of Spec-Bench's form, or held-out text of the demo pair."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from cluster.prompt_files import read_prompts
from replicas.demo import build_corpus

HELD_OUT_LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of the prompts that are cut from held-out text."""


def benchmark_tokens(tokenizer: Any, n: int, file: Path | None, tokens_max: int) -> list[list[int]]:
    """n tokenized prompts from `file`, cut to tokens_max, or of mixed length, cut from text that
    the demo pair was not trained on."""
    if file is not None:
        return [tokenizer(text).input_ids[:tokens_max] for text in read_prompts(file, n)]
    rng = random.Random(0)
    documents = [
        tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids
        for document in build_corpus().held_out
    ]
    assert max(map(len, documents)) >= max(HELD_OUT_LENGTHS), "a document has the longest prompt"
    prompts: list[list[int]] = []
    while len(prompts) < n:  # several pieces of one document, at different places
        wanted = HELD_OUT_LENGTHS[len(prompts) % len(HELD_OUT_LENGTHS)]
        tokens = rng.choice(documents)
        if len(tokens) >= wanted:
            begin = rng.randrange(len(tokens) - wanted + 1)
            prompts.append(tokens[begin : begin + wanted])
    return prompts
