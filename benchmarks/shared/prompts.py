"""Prompts for benchmarks: a file of Spec-Bench's form, or held-out text of the demo pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cluster.bench.workload import held_out_prompts
from cluster.files import read_prompts


def benchmark_tokens(tokenizer: Any, n: int, file: Path | None, tokens_max: int) -> list[list[int]]:
    """n tokenized prompts from `file`, or held-out text; cut to tokens_max."""
    if file is None:
        return held_out_prompts(tokenizer, n)
    texts = read_prompts(file, n)
    return [tokenizer(text).input_ids[:tokens_max] for text in texts]
