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
    documents = list(build_corpus().held_out)
    rng.shuffle(documents)
    prompts: list[list[int]] = []
    for document in documents:
        wanted = lengths[len(prompts) % len(lengths)]
        tokens = tokenizer(document.text, add_special_tokens=False).input_ids
        if len(tokens) < wanted:
            continue
        begin = rng.randrange(len(tokens) - wanted + 1)
        prompts.append(tokens[begin : begin + wanted])
        if len(prompts) == n:
            return prompts
    raise ValueError(f"the held-out text yields only {len(prompts)} prompts")


def benchmark_tokens(tokenizer: Any, n: int, file: Path | None, tokens_max: int) -> list[list[int]]:
    """n tokenized prompts from `file`, or held-out text; cut to tokens_max."""
    if file is None:
        return held_out_tokens(tokenizer, n)
    texts = read_prompts(file, n)
    return [tokenizer(text).input_ids[:tokens_max] for text in texts]
