"""The oracle for families: windows, sinks, experts, latent attention and values of another width
change no bit of what a request receives, whatever runs beside it.

Tokens are those of transformers' own `generate`; tokens and log-probabilities are those of the same
request alone, without drafts, on a replica that shares nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from cluster.local.engine import LocalEngine, Output
from scheduler.config import SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.messages import Priority, Request
from tests.oracle.drafters import replica_of
from tests.oracle.worlds import TIGHT, Mortal, conversations
from tests.reference import plain_greedy
from tests.replicas.families import family_model, family_pair

KINDS = ("llama", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "mimo_v2_flash")
DRAFT_LENS, ROWS = (0, 1, 4, 8), (1, 2, 8, 16)
IN_MAKE_TEST = {("gpt_oss", 4, 8), ("deepseek_v3", 4, 8)}


@cache
def world() -> list[Request]:
    return [
        replace(
            request,
            priority=Priority(number % 3),
            decoding=Decoding(len(request.prompt), logprobs=1),
        )
        for number, request in enumerate(conversations(seed=21))
    ]


def received(outputs: list[Output]) -> list[Any]:
    return [(output.tokens, output.logprobs) for output in outputs]


@cache
def alone(kind: str) -> list[Any]:
    settings = {"num_gpu_blocks_override": 256, "prefix_sharing": False}
    replica = replica_of("none", [], family_pair(kind), **settings)
    engine = LocalEngine(replica, SchedulerConfig(rows_max=1, draft_len=0))
    return received([engine.generate([request])[0] for request in world()])


def cells() -> list[Any]:
    return [
        pytest.param(*cell, marks=() if cell in IN_MAKE_TEST else pytest.mark.slow)
        for cell in product(KINDS, DRAFT_LENS, ROWS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_alone_a_request_receives_what_transformers_generates(kind: str) -> None:
    model = family_model(kind)
    for request, (tokens, _) in zip(world(), alone(kind), strict=True):
        assert tokens == plain_greedy(model, request.prompt, request.max_new_tokens)


@pytest.mark.parametrize(("kind", "k", "rows"), cells())
def test_no_bit_depends_on_what_runs_beside(kind: str, k: int, rows: int) -> None:
    requests = [replace(request, draft_len=k) for request in world()]
    drafter = "model" if k else "none"
    config = SchedulerConfig(rows_max=rows, draft_len=8, kv_reserve=0.0, prefill_tokens_max=24)
    settings = {"num_gpu_blocks_override": TIGHT, "plan_rows": rows, "plan_draft_len": 8}
    engine = Mortal(lambda: replica_of(drafter, [], family_pair(kind), **settings), config)
    outputs = engine.live(requests)
    assert received(outputs) == alone(kind)
    drafted = sum(output.usage.draft_tokens for output in outputs)
    assert (drafted > 0) == (k > 0)
    assert k == 0 or sum(output.usage.accepted_tokens for output in outputs) > 0
