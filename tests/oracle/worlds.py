"""Requests of mixed length that arrive at different times, an engine to run them, and what they
must return."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from cluster.local_engine import LocalEngine, Output
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, SamplingParams
from tests.reference import plain_greedy
from tests.tiny_pairs import ARCHITECTURES, VOCAB, target_model, tiny_replica

LENGTHS = (1, 2, 3, 5, 8, 13, 13, 13, 21, 34, 55)


def mixed_requests(
    vocab: int, n: int, seed: int = 0, new: Sequence[int] = (1, 2, 7, 16, 24)
) -> list[Request]:
    """Random prompts: some of one length (uniform groups), some not, with different limits."""
    rng = random.Random(seed)
    return [
        Request(
            id=f"r{i}",
            prompt=tuple(rng.randrange(vocab) for _ in range(rng.choice(LENGTHS))),
            max_new_tokens=rng.choice(new),
        )
        for i in range(n)
    ]


def sampled(requests: Sequence[Request]) -> list[Request]:
    """The same requests, each with sampling parameters and a seed of its own; one stays greedy."""
    variants = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_k=20),
        SamplingParams(temperature=1.4, top_p=0.9),
        SamplingParams(temperature=0.9, min_p=0.05, top_k=40, top_p=0.95),
        SamplingParams(),
    ]
    return [
        replace(request, sampling=replace(variants[i % len(variants)], seed=1000 + i))
        for i, request in enumerate(requests)
    ]


def run_staggered(
    replica: Replica,
    requests: Sequence[Request],
    rows_max: int,
    draft_len: int | None,
    seed: int = 0,
) -> list[Output]:
    """Submit in bursts between batches, in a batch that `seed` draws; outputs as asked."""
    engine = LocalEngine(
        replica,
        SchedulerConfig(rows_max=rows_max, draft_len=draft_len, prefill_rows_max=4),
        check=True,
    )
    rng = random.Random(seed)
    arrivals = list(requests)
    rng.shuffle(arrivals)
    while arrivals:
        for _ in range(min(len(arrivals), rng.choice((1, 1, 2, 5)))):
            engine.submit(arrivals.pop())
        for _ in range(rng.choice((0, 1, 3))):
            engine.advance()
    engine.run()
    replica.check_integrity()
    assert replica.residents == (), "a finished sequence frees its blocks"
    return [engine.outputs[request.id] for request in requests]


@dataclass(frozen=True)
class World:
    """Requests for a tiny pair, and their outputs one at a time without a draft."""

    architecture: str
    seed: int

    @cached_property
    def requests(self) -> list[Request]:
        return mixed_requests(VOCAB, 12, seed=self.seed + ARCHITECTURES.index(self.architecture))

    @cached_property
    def greedy(self) -> list[list[int]]:
        """By transformers' own `generate`."""
        model = target_model(self.architecture)
        return [plain_greedy(model, r.prompt, r.max_new_tokens) for r in self.requests]

    @cached_property
    def sampled(self) -> list[list[int]]:
        """Of `sampled(requests)`."""
        replica = tiny_replica(self.architecture)
        engine = LocalEngine(replica, SchedulerConfig(rows_max=1, draft_len=0))
        return [output.tokens for output in engine.generate(sampled(self.requests))]


@cache
def world(architecture: str, seed: int) -> World:
    """One for all tests of a module that draws its requests by `seed`."""
    return World(architecture, seed)
