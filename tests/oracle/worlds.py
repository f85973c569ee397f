"""Requests of mixed length that arrive at different times, an engine to run them, and what they
must return: those of tiny pairs, and of the embedded one, named "demo".

`Mortal` is a world with all that a request may live through: prompts filled in chunks, prefixes
that several share, blocks that run out, batches that fail in the middle, replicas that die.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cluster.local.engine import REPLICA_ID, LocalEngine, Output
from replicas.config import ReplicaConfig
from replicas.demo import TARGET_DIR
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import ReplicaJoined, ReplicaLost, Request, Sampling
from tests.reference import plain_greedy
from tests.replicas.pool import Failing
from tests.tiny_pairs import ARCHITECTURES, DEVICE, VOCAB, target_model, tiny_replica

LENGTHS = (1, 2, 3, 5, 8, 13, 13, 13, 21, 34, 55)
DEMO = "demo"
DEMO_TEXTS = (
    "The",
    "The for statement is used to iterate over the elements of a sequence",
    "Return a new list containing",
    "class Thread:\n    This class represents an activity that is run in a separate thread",
    "If the argument is",
    "Raises ValueError when",
    "An example:\n\n>>> import os\n>>> os.path.join(",
    "Note that the module must be imported before the function is called, and that it is an error",
    "Deprecated since version 3.",
    "zip",
)
DEMO_NEW = (1, 20, 33, 8)
Answered = tuple[tuple[Request, list[int]], ...]


def mixed_requests(
    vocab: int, n: int, seed: int = 0, new: Sequence[int] = (1, 2, 7, 16, 24)
) -> list[Request]:
    """Random prompts: some of one length (uniform batches), some not, with different limits."""
    rng = random.Random(seed)
    return [
        Request(
            id=f"r{i}",
            prompt=tuple(rng.randrange(vocab) for _ in range(rng.choice(LENGTHS))),
            max_new_tokens=rng.choice(new),
        )
        for i in range(n)
    ]


def conversations(seed: int) -> list[Request]:
    """Three system prompts, of which one is the beginning of another, with different ends."""
    rng = random.Random(seed)
    base = tuple(rng.randrange(VOCAB) for _ in range(50))
    systems = [base, base[:22], tuple(rng.randrange(VOCAB) for _ in range(31))]
    return [
        Request(
            id=f"r{index}",
            prompt=rng.choice(systems)
            + tuple(rng.randrange(VOCAB) for _ in range(rng.choice((0, 1, 2, 5, 9)))),
            max_new_tokens=rng.choice((5, 16, 30)),
            tenant=rng.choice(("", "", "other")),
        )
        for index in range(24)
    ]


def demo_requests() -> list[Request]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    return [
        Request(f"r{i}", tuple(tokenizer(text).input_ids), DEMO_NEW[i % len(DEMO_NEW)])
        for i, text in enumerate(DEMO_TEXTS * 2)
    ]


def sampled(requests: Sequence[Request]) -> list[Request]:
    """The same requests, each with sampling parameters and a seed of its own; one stays greedy."""
    variants = [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6, top_k=20),
        Sampling(temperature=1.4, top_p=0.9),
        Sampling(temperature=0.9, min_p=0.05, top_k=40, top_p=0.95),
        Sampling(),
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
    """Submit in bursts between batches, in an order that `seed` draws; outputs as asked."""
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


@cache
def demo_replica() -> Replica:
    return Replica.load(ReplicaConfig(device=DEVICE, num_gpu_blocks_override=1024))


def replica_for(architecture: str) -> Replica:
    return demo_replica() if architecture == DEMO else tiny_replica(architecture)


@cache
def greedy_answers(architecture: str) -> Answered:
    """Requests, and what transformers' own `generate` gives for each."""
    model: PreTrainedModel
    if architecture == DEMO:
        model = AutoModelForCausalLM.from_pretrained(TARGET_DIR).eval()
        requests = demo_requests()
    else:
        model = target_model(architecture)
        requests = mixed_requests(VOCAB, 20, seed=ARCHITECTURES.index(architecture))
    return tuple(
        (request, plain_greedy(model, request.prompt, request.max_new_tokens))
        for request in requests
    )


@cache
def sampled_answers(architecture: str) -> Answered:
    """Each request by itself: batch 1, draft length 0."""
    plain = demo_requests() if architecture == DEMO else mixed_requests(VOCAB, 16, seed=50)
    engine = LocalEngine(replica_for(architecture), SchedulerConfig(rows_max=1, draft_len=0))
    return tuple((request, engine.generate([request])[0].tokens) for request in sampled(plain))


def check_answers(
    replica: Replica, answered: Answered, rows_max: int, draft_len: int | None, seed: int = 0
) -> list[Output]:
    """Runs all of them, staggered; each has its own answer."""
    outputs = run_staggered(
        replica, [request for request, _ in answered], rows_max, draft_len, seed
    )
    for (request, tokens), output in zip(answered, outputs, strict=True):
        assert output.tokens == tokens, request
    return outputs


TIGHT = 64
"""Blocks: one sequence of full length."""


class Mortal(LocalEngine):
    """Its replica may die, and a new one comes that knows nothing."""

    def __init__(self, load: Callable[[], Replica], config: SchedulerConfig) -> None:
        """`load` makes replicas of few blocks."""
        self._load = load
        self._rows_max = config.rows_max
        self.replica = load()
        self._free = self.replica.free_blocks
        super().__init__(Failing(self.replica, share=0.25), config, check=True)

    def kill(self) -> None:
        """What its batches would have committed is lost."""
        self._batches.clear()
        self._feed(ReplicaLost(REPLICA_ID, by_batch=False))
        self.replica = self._load()
        self._runner = Failing(self.replica, share=0.25)
        self._feed(ReplicaJoined(REPLICA_ID, self.replica.spec))

    def live(self, requests: Sequence[Request]) -> list[Output]:
        """What the requests receive, through all of it."""
        for at, request in enumerate(requests):
            self.submit(request)
            for _ in range(at % 3):
                self.advance()
            if at % 9 == 8:
                self.kill()
        self.run()
        outputs = [self.outputs[request.id] for request in requests]
        self.replica.check_integrity()
        assert (self.replica.residents, self.replica.free_blocks) == ((), self._free)
        found = sum(output.usage.cached_tokens for output in outputs)
        assert found > 200, found
        assert self._rows_max == 1 or self.scheduler.snapshot().preempted > 0
        assert sum(output.usage.recovered for output in outputs) > 0
        return outputs
