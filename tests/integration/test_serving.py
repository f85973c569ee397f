"""Proves, through real gRPC on a real Ray: answers equal plain decoding, whatever else goes on."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from cluster.client import AsyncClient
from protos import lockstep_pb2 as pb
from tests.chaos.hosted import HostedCluster
from tests.integration.conftest import Expected

pytestmark = pytest.mark.ray

CANCELS = 300
PROMPTS = [f"the quick {'brown ' * (n % 7)}fox number {n}" for n in range(64)]


def test_many_at_once_equal_plain_decoding_and_hundreds_of_cancels_leave_nothing_over(
    cluster: HostedCluster, expected: Expected
) -> None:
    rng = Random(4)
    places = asyncio.Semaphore(32)

    async def one(many: AsyncClient, number: int) -> tuple[list[int], list[str]]:
        # By measured times a busy machine might draft nothing.
        request = pb.GenerateRequest(prompt=PROMPTS[number], max_new_tokens=32, draft_len=3)
        if number % 2:
            answer = await many.generate(request)
            assert answer.end.usage.completion_tokens == len(answer.token_ids)
            return list(answer.token_ids), list(answer.end.replicas)
        chunks = [chunk async for chunk in many.stream(request)]
        return [token for chunk in chunks for token in chunk.token_ids], [*chunks[-1].end.replicas]

    async def cancelled(many: AsyncClient, number: int) -> bool:
        prompt = [rng.randrange(2, 300) for _ in range(rng.choice([1, 8, 40]))]
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=prompt),
            max_new_tokens=400,
            ignore_eos=True,
            temperature=float(number % 3 == 0),
        )
        async with places:
            try:
                async with asyncio.timeout(rng.uniform(0.0, 0.3)):
                    if number % 2:
                        await many.generate(request)
                    else:
                        async for _ in many.stream(request):
                            pass
            except TimeoutError:
                return True
        return False

    async def ask() -> tuple[list[tuple[list[int], list[str]]], list[bool]]:
        async with AsyncClient(cluster.address) as many:
            return await asyncio.gather(
                asyncio.gather(*(one(many, number) for number in range(len(PROMPTS)))),
                asyncio.gather(*(cancelled(many, number) for number in range(CANCELS))),
            )

    answers, cancels = asyncio.run(ask())
    assert [tokens for tokens, _ in answers] == expected(PROMPTS, 32)
    # One that was silent for too long has joined again, under its name and another suffix.
    names = {name.rpartition(".")[0] for _, replicas in answers for name in replicas}
    assert len(names) == 2
    assert sum(cancels) > CANCELS / 2
    status = cluster.wait_until_idle()
    assert sum(replica.residents for replica in status.replicas) == 0
    assert 0 < status.acceptance < 1
