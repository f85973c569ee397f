"""The oracle: greedy output equals transformers' `generate` of the target alone, in float32.

Every architecture, batch size, draft length, mixed lengths, staggered arrival; token for token.
"""

from __future__ import annotations

from functools import cache

import pytest

from scheduler.messages import FinishReason, Request
from tests.oracle.drafters import ORACLES, oracle
from tests.oracle.worlds import mixed_requests, run_staggered
from tests.reference import plain_greedy
from tests.tiny_pairs import ARCHITECTURES, VOCAB, target_model, tiny_replica

RUNS = [
    *(("model", rows, k) for rows in (1, 3, 8, 16) for k in (0, 1, 3, 5, 8, None)),
    *((name, 8, 5) for name in ORACLES),
]


@cache
def expected(architecture: str) -> tuple[tuple[Request, list[int]], ...]:
    model = target_model(architecture)
    return tuple(
        (request, plain_greedy(model, request.prompt, request.max_new_tokens))
        for request in mixed_requests(VOCAB, 20, seed=ARCHITECTURES.index(architecture))
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("drafter", "rows_max", "draft_len"), RUNS)
def test_output_equals_plain_generate(
    architecture: str, drafter: str, rows_max: int, draft_len: int | None
) -> None:
    pairs = expected(architecture)
    replica = tiny_replica(architecture, drafter=oracle(drafter, pairs))
    seed = rows_max + (draft_len or 0)
    requests = [request for request, _ in pairs]
    outputs = run_staggered(replica, requests, rows_max, draft_len, seed)
    for (request, tokens), output in zip(pairs, outputs, strict=True):
        assert output.tokens == tokens, request.id
        assert output.reason is FinishReason.LENGTH
    drafted = sum(output.usage.draft_tokens for output in outputs)
    accepted = sum(output.usage.accepted_tokens for output in outputs)
    if draft_len == 0:
        assert drafted == 0
    elif draft_len is not None and drafter == "model":
        assert 0 < accepted < drafted, "the pair must see acceptance and rejection"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_draft_of_another_architecture_changes_nothing(architecture: str) -> None:
    other = ARCHITECTURES[ARCHITECTURES.index(architecture) - 1]
    pairs = expected(architecture)
    outputs = run_staggered(
        tiny_replica(architecture, draft_architecture=other), [r for r, _ in pairs], 8, 3
    )
    assert [output.tokens for output in outputs] == [tokens for _, tokens in pairs]


def test_layers_that_are_not_joined_change_nothing() -> None:
    pairs = expected("glm4")
    outputs = run_staggered(tiny_replica("glm4", fuse_layers=False), [r for r, _ in pairs], 8, 3)
    assert [output.tokens for output in outputs] == [tokens for _, tokens in pairs]
