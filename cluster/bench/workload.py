"""What is asked: prompts and how their tokens are chosen, the same for every way to ask."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.files import read_prompts
from scheduler.messages import Request, SamplingParams
from scheduler.simulation import Lengths, parse_lengths

Prompt = str | tuple[int, ...]
"""Text, or token ids as they are."""


class BenchError(ValueError):
    """A benchmark that cannot be run as asked; the message names the option."""


HELD_OUT_LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of the prompts that are cut from held-out text."""


@dataclass(frozen=True)
class Workload:
    """The requests of a run; they go round the prompts as often as needed."""

    prompts: tuple[Prompt, ...]
    described: str
    """Where the prompts come from, for people."""
    max_new_tokens: int
    sampling: SamplingParams
    """The seed is that of request 0; each later one has the next, so no two share their noise."""
    ignore_eos: bool = True
    """Every request then commits exactly max_new_tokens."""
    draft_len: int | None = None
    salt: str = ""
    """Begins the requests' cache salts; another for every run that may share a cluster."""

    def prompt(self, number: int) -> Prompt:
        return self.prompts[number % len(self.prompts)]

    def cache_salt(self, number: int) -> str:
        """Another each time round the prompts: what several prompts of one round begin with may be
        found in the prefix cache, a prompt that was asked before may not."""
        return f"{self.salt} {number // len(self.prompts)}"

    def sampling_of(self, number: int) -> SamplingParams:
        return replace(self.sampling, seed=self.sampling.seed + number)


def synthetic_prompts(
    n: int, lengths: Lengths, vocab_size: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Uniformly random token ids in [0, vocab_size): every replica must compute them, and a draft
    that was trained on text guesses badly what follows."""
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(vocab_size) for _ in range(lengths(rng))) for _ in range(n))


def held_out_prompts(tokenizer: Any, n: int, seed: int = 0) -> list[list[int]]:
    """n prompts of mixed length cut from text that the demo pair was not trained on."""
    from replicas.demo import build_corpus

    rng = random.Random(seed)
    texts = [document.text for document in build_corpus().held_out]
    documents = [
        tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in texts
    ]
    longest = max(map(len, documents))
    if longest < max(HELD_OUT_LENGTHS):
        raise ValueError(f"the longest held-out document has only {longest} tokens")
    prompts: list[list[int]] = []
    while len(prompts) < n:  # several pieces of one document, at different places
        wanted = HELD_OUT_LENGTHS[len(prompts) % len(HELD_OUT_LENGTHS)]
        tokens = rng.choice(documents)
        if len(tokens) >= wanted:
            begin = rng.randrange(len(tokens) - wanted + 1)
            prompts.append(tokens[begin : begin + wanted])
    return prompts


def prompts_of(
    n: int,
    file: Path | None,
    lengths: str | None,
    vocab_size: int,
    tokenizer: Callable[[], Any],
    seed: int,
) -> tuple[tuple[Prompt, ...], str]:
    """At most n prompts and where they come from: a file, random tokens, else held-out text.

    `tokenizer` gives the demo pair's; it is asked for held-out text only. Raises PromptsError, and
    OSError for a file that cannot be read.
    """
    if file is not None:
        return tuple(read_prompts(file, n)), str(file.name)
    if lengths is not None:
        drawn = synthetic_prompts(n, parse_lengths(lengths), vocab_size, seed)
        return drawn, f"random tokens, {lengths} per prompt, seed {seed}"
    cut = held_out_prompts(tokenizer(), n, seed=seed)
    return tuple(map(tuple, cut)), f"held-out text of the demo pair, seed {seed}"


def engine_request(
    workload: Workload,
    number: int,
    encode: Callable[[str], tuple[int, ...]],
    eos: Sequence[int],
    prefix: str = "",
) -> Request:
    """The request as the engine takes it; `prefix` begins its id."""
    prompt = workload.prompt(number)
    return Request(
        id=f"{prefix}{number}",
        prompt=encode(prompt) if isinstance(prompt, str) else prompt,
        max_new_tokens=workload.max_new_tokens,
        sampling=workload.sampling_of(number),
        stop_token_ids=() if workload.ignore_eos else tuple(eos),
        draft_len=workload.draft_len,
        cache_salt=workload.cache_salt(number),
    )
