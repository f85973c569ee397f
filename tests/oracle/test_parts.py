"""The oracle where rows of different lengths read their keys and values in parts.

Here a part costs next to nothing, so groups are divided wherever lengths differ.
"""

from __future__ import annotations

import pytest

from cluster.local_engine import LocalEngine
from replicas import paged_cache
from scheduler.config import SchedulerConfig
from tests.oracle.worlds import sampled, world
from tests.tiny_pairs import ARCHITECTURES, tiny_replica

SEED = 120


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
    whole.generate(world(architecture, SEED).requests)
    monkeypatch.setattr(paged_cache, "PART_NUMBERS", 1)
    monkeypatch.setattr(paged_cache, "PART_SETUP_NUMBERS", 0)
    engine = LocalEngine(tiny_replica(architecture), config, check=True)
    outputs = engine.generate(world(architecture, SEED).requests)
    assert [output.tokens for output in outputs] == world(architecture, SEED).greedy
    assert padding(engine) < 0.02 < 0.1 < padding(whole)
    engine = LocalEngine(tiny_replica(architecture), config, check=True)
    outputs = engine.generate(sampled(world(architecture, SEED).requests))
    assert [output.tokens for output in outputs] == world(architecture, SEED).sampled
