"""Proves: hundreds of cancels at random moments leave no sequence and no KV block over.

The same code as `python -m benchmarks.soak --cancels 1000`, on the tiny real pair.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from benchmarks.soak import cancel_many, left_over
from cluster.client import AsyncClient
from protos import lockstep_pb2 as pb
from tests.integration.conftest import Expected, RunningCluster

pytestmark = pytest.mark.ray

CANCELS = 300
NOTHING = {"waiting": 0, "running": 0, "residents": 0, "kv_blocks": 0}


def test_cancels_leave_nothing_over(cluster: RunningCluster, expected: Expected) -> None:
    rng = Random(4)
    prompts = [[rng.randrange(2, 300) for _ in range(rng.choice([1, 8, 40]))] for _ in range(32)]

    async def run() -> tuple[Counter[str], dict[str, int], list[int]]:
        async with AsyncClient(cluster.address) as client:
            ends = await cancel_many(client, prompts, rng, CANCELS, in_flight=32)
            left = await left_over(client, 60.0)
            again = await client.generate(pb.GenerateRequest(prompt="after", max_new_tokens=20))
            return ends, left, list(again.token_ids)

    ends, left, again = asyncio.run(run())
    print(f"{CANCELS} requests: {dict(ends)}")
    assert sum(ends.values()) == CANCELS
    assert set(ends) <= {"cancelled", "OK"}
    assert ends["cancelled"] > CANCELS / 2
    assert left == NOTHING
    assert again == expected(["after"], 20)[0]
