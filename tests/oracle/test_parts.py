"""The oracle where rows of different lengths read their keys and values in parts.

Here a part costs next to nothing, so groups are divided wherever lengths differ.
"""

from __future__ import annotations

from functools import cache

import pytest

from cluster.local_engine import LocalEngine
from replicas import paged_cache
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
from tests.oracle.worlds import mixed_requests, sampled
from tests.reference import plain_greedy
from tests.tiny_pairs import ARCHITECTURES, VOCAB, target_model, tiny_replica


@cache
def requests_of(architecture: str) -> list[Request]:
    return mixed_requests(VOCAB, 12, seed=120 + ARCHITECTURES.index(architecture))


@cache
def greedy_reference(architecture: str) -> list[list[int]]:
    model = target_model(architecture)
    return [plain_greedy(model, r.prompt, r.max_new_tokens) for r in requests_of(architecture)]


@cache
def sampled_reference(architecture: str) -> list[list[int]]:
    engine = LocalEngine(tiny_replica(architecture), SchedulerConfig(rows_max=1, draft_len=0))
    return [output.tokens for output in engine.generate(sampled(requests_of(architecture)))]


def padding(engine: LocalEngine) -> float:
    own = sum(result.kv_positions_own for result in engine.results)
    return 1 - own / sum(result.kv_positions_read for result in engine.results)


@pytest.mark.parametrize("draft_len", [0, 4, None])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_output_is_that_of_plain_decoding(
    architecture: str, draft_len: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SchedulerConfig(rows_max=6, draft_len=draft_len)
    whole = LocalEngine(tiny_replica(architecture), config)
    whole.generate(requests_of(architecture))
    monkeypatch.setattr(paged_cache, "PART_NUMBERS", 1)
    engine = LocalEngine(tiny_replica(architecture), config, check=True)
    outputs = engine.generate(requests_of(architecture))
    assert [output.tokens for output in outputs] == greedy_reference(architecture)
    assert padding(engine) < 0.02 < 0.1 < padding(whole)
    engine = LocalEngine(tiny_replica(architecture), config, check=True)
    outputs = engine.generate(sampled(requests_of(architecture)))
    assert [output.tokens for output in outputs] == sampled_reference(architecture)
