"""The oracle where KV blocks run out: sequences are sent back and prefilled again, and no token of
the output changes, greedy or sampled.
"""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.oracle import OracleDrafter
from cluster.local_engine import LocalEngine
from scheduler.config import SchedulerConfig
from scheduler.messages import FinishReason, Priority, Request
from tests.oracle.drafters import ORACLES, oracle
from tests.oracle.worlds import mixed_requests, sampled
from tests.reference import plain_greedy
from tests.tiny_pairs import ARCHITECTURES, VOCAB, target_model, tiny_replica

BLOCKS = 64
DRAFTERS = ("model", *ORACLES)


def run(
    architecture: str,
    requests: list[Request],
    kv_blocks: int,
    drafter: OracleDrafter | None = None,
) -> tuple[list[list[int]], int]:
    """(tokens of each request, how often a sequence was sent back)."""
    replica = tiny_replica(architecture, drafter=drafter, kv_blocks=kv_blocks)
    config = SchedulerConfig(rows_max=4, draft_len=3, kv_reserve=0.0)
    engine = LocalEngine(replica, config, check=True)
    outputs = engine.generate(requests)
    replica.check_integrity()
    assert replica.free_blocks == kv_blocks
    assert {output.reason for output in outputs} == {FinishReason.LENGTH}
    return [output.tokens for output in outputs], engine.scheduler.snapshot().preempted


def requests_of(seed: int) -> list[Request]:
    made = mixed_requests(VOCAB, 12, seed=seed, new=(30, 60, 90))
    return [
        Request(one.id, one.prompt, one.max_new_tokens, priority=Priority(index % 3))
        for index, one in enumerate(made)
    ]


@cache
def answered(architecture: str) -> list[tuple[Request, list[int]]]:
    model = target_model(architecture)
    return [
        (request, plain_greedy(model, request.prompt, request.max_new_tokens))
        for request in requests_of(3)
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_equals_plain_generate(architecture: str, drafter: str) -> None:
    pairs = answered(architecture)
    requests = [request for request, _ in pairs]
    tokens, preempted = run(architecture, requests, BLOCKS, oracle(drafter, pairs))
    assert preempted > 0, "memory was not tight"
    for (request, expected), got in zip(pairs, tokens, strict=True):
        assert got == expected, request.id


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_output_is_that_of_a_roomy_replica(drafter: str) -> None:
    requests = sampled(requests_of(4))
    roomy, none = run("llama", requests, 16 * BLOCKS)
    made = oracle(drafter, zip(requests, roomy, strict=True))
    tight, preempted = run("llama", requests, BLOCKS, made)
    assert preempted > none == 0
    assert tight == roomy
