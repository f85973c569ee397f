"""The oracle where KV blocks run out: sequences are sent back and prefilled again, and no token of
the output changes, greedy or sampled.
"""

from __future__ import annotations

import pytest

from cluster.local_engine import LocalEngine
from scheduler.config import SchedulerConfig
from scheduler.messages import FinishReason, Priority, Request
from tests.oracle.worlds import mixed_requests, sampled
from tests.reference import plain_greedy
from tests.tiny_pairs import ARCHITECTURES, VOCAB, target_model, tiny_replica

BLOCKS = 64


def run(architecture: str, requests: list[Request], kv_blocks: int) -> tuple[list[list[int]], int]:
    """(tokens of each request, how often a sequence was sent back)."""
    replica = tiny_replica(architecture, kv_blocks=kv_blocks)
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_equals_plain_generate(architecture: str) -> None:
    requests = requests_of(3)
    tokens, preempted = run(architecture, requests, BLOCKS)
    assert preempted > 0, "memory was not tight"
    model = target_model(architecture)
    for request, got in zip(requests, tokens, strict=True):
        assert got == plain_greedy(model, request.prompt, request.max_new_tokens), request.id


def test_sampled_output_is_that_of_a_roomy_replica() -> None:
    requests = sampled(requests_of(4))
    tight, preempted = run("llama", requests, BLOCKS)
    roomy, none = run("llama", requests, 16 * BLOCKS)
    assert preempted > none == 0
    assert tight == roomy
