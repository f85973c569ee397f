"""Draws requests of every sort, each with its right answer."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from cluster.frontend.target_text import TargetText
from protos import lockstep_pb2 as pb
from scheduler.messages import Sampling
from tests.chaos.answers import TOKENS_MAX, Base, cut
from tests.chaos.load import Ask

LIMITS = (8, 32, 96, TOKENS_MAX)
WORDS = ["héllo", "wörld", "the", "quick", "brown", "漢字", "fox", "😀", "jumps", "over", "lazy"]


def draw_prompts(rng: Random, text: TargetText, count: int) -> list[tuple[int, ...]]:
    """Prompts of 1 to about 60 tokens, no two alike."""
    prompts: dict[tuple[int, ...], None] = {}
    while len(prompts) < count:
        words = rng.choices(WORDS, k=rng.choice([1, 3, 8, 20]))
        prompts[text.encode(" ".join([*words, str(len(prompts))]))] = None
    return list(prompts)


def draw_samplings(rng: Random, count: int) -> list[Sampling]:
    """Half of them greedy."""
    kinds = [
        Sampling(),
        Sampling(),
        Sampling(temperature=1.0, seed=rng.randrange(2**40)),
        Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=rng.randrange(2**40)),
    ]
    return [kinds[number % len(kinds)] for number in range(count)]


class Mix:
    """The requests of a run: unary and streams, stop strings, cancels, deadlines, priorities."""

    def __init__(self, rng: Random, bases: Sequence[Base], text: TargetText) -> None:
        self._rng = rng
        self._bases = bases
        self._text = text
        self._number = 0

    def draw(self) -> Ask:
        rng = self._rng
        base = rng.choice(self._bases)
        limit = rng.choice(LIMITS)
        ignore_eos = rng.random() < 0.7
        right = cut(base, self._text, limit, ignore_eos)
        stops: list[str] = []
        if rng.random() < 0.15 and (stop := _stop_in(right.text, rng)):
            stops = [stop]
            right = cut(base, self._text, limit, ignore_eos, stops)
        self._number += 1
        message = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=base.prompt),
            max_new_tokens=limit,
            ignore_eos=ignore_eos,
            stop=stops,
            request_id=f"ask-{self._number}",
            priority=rng.choice(pb.Priority.values()),
        )
        if base.sampling.temperature > 0:
            message.temperature = base.sampling.temperature
            message.top_k = base.sampling.top_k
            message.top_p = base.sampling.top_p
            message.seed = base.sampling.seed
        if rng.random() < 0.2:
            message.draft_len = rng.choice([0, 1, 3])
        cancel_after_s = rng.uniform(0.02, 1.0) if rng.random() < 0.1 else None
        if cancel_after_s is None and rng.random() < 0.07:
            message.timeout_s = rng.uniform(0.2, 2.0)
        return Ask(message, right, stream=rng.random() < 0.6, cancel_after_s=cancel_after_s)


def _stop_in(text: str, rng: Random) -> str:
    """Some characters of the text that no bad byte is near; empty if there are none."""
    size = rng.choice([1, 2, 4])
    at = [
        start
        for start in range(len(text) - size)
        if (part := text[start : start + size]).isascii() and part.isprintable()
    ]
    if not at:
        return ""
    start = rng.choice(at)
    return text[start : start + size]
