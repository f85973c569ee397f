"""What is asked: prompts and options, the same for every way to ask."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from scheduler.messages import Request, Sampling
from scheduler.simulation import Lengths

Prompt = str | tuple[int, ...]
"""Text, or token ids as they are."""
_SAMPLING = {field.name for field in fields(Sampling)}


class BenchError(ValueError):
    """A benchmark that cannot be run as asked; the message names the option."""


class Unanswered(BenchError):
    """The server could not be asked."""


@dataclass(frozen=True)
class Workload:
    """The requests of a run; they go round the prompts as often as needed."""

    prompts: tuple[Prompt, ...]
    options: Mapping[str, Any]
    """Of every request, by the names of a GenerateRequest; max_new_tokens is among them."""
    seed: int = 0
    """Of request 0; each later one has the next, so no two share their noise."""
    salt: str = ""
    """Begins the requests' cache salts; another for every run that may share a cluster."""

    def prompt(self, number: int) -> Prompt:
        return self.prompts[number % len(self.prompts)]

    def options_of(self, number: int) -> dict[str, Any]:
        """Of this request. Its cache salt is another each time round the prompts: what several
        prompts of one round begin with may be found in the prefix cache, a prompt that was asked
        before may not."""
        options = {**self.options, "cache_salt": f"{self.salt} {number // len(self.prompts)}"}
        if options.get("temperature"):
            options["seed"] = self.seed + number
        return options


def synthetic_prompts(
    n: int, lengths: Lengths, vocab_size: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Uniformly random token ids in [0, vocab_size): every replica must compute them, and a draft
    that was trained on text guesses badly what follows."""
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(vocab_size) for _ in range(lengths(rng))) for _ in range(n))


def engine_request(
    workload: Workload, number: int, encode: Callable[[str], tuple[int, ...]], eos: Sequence[int]
) -> Request:
    """The request as the engine takes it."""
    prompt, options = workload.prompt(number), workload.options_of(number)
    return Request(
        id=f"{workload.salt} {number}",
        prompt=encode(prompt) if isinstance(prompt, str) else prompt,
        max_new_tokens=options["max_new_tokens"],
        sampling=Sampling(**{name: value for name, value in options.items() if name in _SAMPLING}),
        stop_token_ids=() if options.get("ignore_eos") else tuple(eos),
        draft_len=options.get("draft_len"),
        cache_salt=options["cache_salt"],
    )
