"""The oracle where prompts share prefixes and are filled in chunks: blocks are taken over from
running and from finished requests, evicted and computed again, and no token of the output changes.
"""

from __future__ import annotations

import random
from functools import cache

import pytest

from cluster.local_engine import LocalEngine
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
from tests.oracle.drafters import oracle
from tests.oracle.worlds import sampled
from tests.reference import plain_greedy
from tests.tiny_pairs import ARCHITECTURES, VOCAB, target_model, tiny_replica


def conversations(seed: int) -> list[Request]:
    """Three system prompts, of which one is the beginning of another, with different ends."""
    rng = random.Random(seed)
    base = tuple(rng.randrange(VOCAB) for _ in range(50))
    systems = [base, base[:22], tuple(rng.randrange(VOCAB) for _ in range(31))]
    return [
        Request(
            id=f"r{index}",
            prompt=rng.choice(systems)
            + tuple(rng.randrange(VOCAB) for _ in range(rng.choice(ENDS))),
            max_new_tokens=rng.choice((5, 16, 30)),
            tenant=rng.choice(("", "", "other")),
        )
        for index in range(24)
    ]


ENDS = (0, 1, 2, 5, 9)


def serve(
    replica: Replica, requests: list[Request], draft_len: int, chunk: int
) -> tuple[list[list[int]], int]:
    """(tokens of each request, prompt tokens that were found); they come a few at a time."""
    config = SchedulerConfig(rows_max=4, draft_len=draft_len, prefill_tokens_max=chunk)
    engine = LocalEngine(replica, config, check=True)
    for at, request in enumerate(requests):
        engine.submit(request)
        for _ in range(at % 4):
            engine.advance()
    engine.run()
    replica.check_integrity()
    assert replica.free_blocks == replica.spec.kv_blocks, "what nobody owns is free"
    outputs = [engine.outputs[request.id] for request in requests]
    return [one.tokens for one in outputs], sum(one.usage.cached_tokens for one in outputs)


@cache
def answered(architecture: str, seed: int) -> list[tuple[Request, list[int]]]:
    model = target_model(architecture)
    return [
        (request, plain_greedy(model, request.prompt, request.max_new_tokens))
        for request in conversations(seed)
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("drafter", "draft_len", "chunk", "kv_blocks"),
    [
        ("model", 3, 13, 2048),
        ("model", 4, 64, 64),
        ("model", 0, 8, 64),
        ("never", 4, 13, 64),
        ("half", 3, 8, 64),
        ("always", 4, 64, 64),
    ],
)
def test_output_equals_plain_generate(
    architecture: str, drafter: str, draft_len: int, chunk: int, kv_blocks: int
) -> None:
    pairs = answered(architecture, draft_len)
    replica = tiny_replica(architecture, drafter=oracle(drafter, pairs), kv_blocks=kv_blocks)
    tokens, found = serve(replica, [request for request, _ in pairs], draft_len, chunk)
    assert found > 200, "hardly anything was shared"
    for (request, expected), got in zip(pairs, tokens, strict=True):
        assert got == expected, request.id


@pytest.mark.parametrize(
    ("drafter", "graphs"), [("model", "off"), ("model", "on"), ("half", "off"), ("half", "on")]
)
def test_sampled_output_is_the_same_with_and_without_sharing(drafter: str, graphs: str) -> None:
    """Graphs: as on a device, where prompts with a cached prefix and without take two ways."""
    requests = sampled(conversations(seed=9))
    unshared = tiny_replica("llama", graphs=graphs, prefix_sharing=False)
    alone, none = serve(unshared, requests, 3, 2048)
    made = oracle(drafter, zip(requests, alone, strict=True))
    shared, found = serve(tiny_replica("llama", drafter=made, graphs=graphs), requests, 3, 16)
    assert shared == alone
    assert found > none == 0


def test_a_chat_goes_on_where_it_ended() -> None:
    """Each turn's prompt is all that was said before."""
    replica = tiny_replica("llama")
    engine = LocalEngine(replica, SchedulerConfig(draft_len=3), check=True)
    model = target_model("llama")
    said = (5, 9, 1, 7, 3)
    found = []
    for turn in range(4):
        (output,) = engine.generate([Request(f"t{turn}", said, 20)])
        assert output.tokens == plain_greedy(model, said, 20)
        found.append((output.usage.cached_tokens, len(said)))
        said += (*output.tokens, 4, 2)
    for cached, length in found[1:]:
        assert length - 12 <= cached < length
