"""Proves: killing a replica or the pool while requests run changes no token and loses no request.

Runs last among the integration tests, because it takes processes away. More kinds of failure, with
fakes in the pair's place, are in `test_failures_*`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest

from cluster.client import NO_RETRY, AsyncClient
from protos import lockstep_pb2 as pb
from tests.integration.conftest import Expected, RunningCluster

pytestmark = pytest.mark.ray

PROMPTS = [f"héllo {'wörld ' * (n % 5)}{n}" for n in range(24)]
TOKENS = 400
SILENCE_S_MAX = 25.0
"""Ten times what it is here, and less than what the links wait for a pool."""


async def ask_all(
    cluster: RunningCluster, disturb: Callable[[], None]
) -> tuple[list[list[int]], list[pb.End], float]:
    """(tokens, ends, longest silence of a stream in seconds); disturbs once all streams flow."""
    flowing = 0
    silence_s = 0.0
    all_flow = asyncio.Event()

    async def one(client: AsyncClient, prompt: str) -> tuple[list[int], pb.End]:
        nonlocal flowing, silence_s
        tokens: list[int] = []
        end = pb.End()
        last_s = 0.0
        request = pb.GenerateRequest(prompt=prompt, max_new_tokens=TOKENS, ignore_eos=True)
        async for chunk in client.stream(request):
            now_s = time.monotonic()
            silence_s = max(silence_s, now_s - last_s if last_s else 0.0)
            last_s = now_s
            flowing += not tokens and bool(chunk.token_ids)
            tokens.extend(chunk.token_ids)
            if flowing == len(PROMPTS):
                all_flow.set()
            if chunk.HasField("end"):
                end = chunk.end
        return tokens, end

    # The cluster itself must keep its promise, without a client that tries again.
    async with AsyncClient(cluster.address, retry=NO_RETRY) as client, asyncio.timeout(300):
        streams = [asyncio.ensure_future(one(client, prompt)) for prompt in PROMPTS]
        await all_flow.wait()
        await asyncio.to_thread(disturb)
        done = await asyncio.gather(*streams)
    return [tokens for tokens, _ in done], [end for _, end in done], silence_s


def undisturbed(cluster: RunningCluster) -> list[list[int]]:
    tokens, _, _ = asyncio.run(ask_all(cluster, lambda: None))
    return tokens


def test_a_killed_replica_loses_no_request_and_no_token(
    cluster: RunningCluster, expected: Expected
) -> None:
    reference = undisturbed(cluster)
    plain = expected(PROMPTS[:4], 40)
    for tokens, prefix in zip(reference, plain, strict=False):
        assert tokens[: len(prefix)] == prefix

    # Asked for before: on a fast machine the streams do not wait for Ray's answer.
    replica = next(iter(cluster.replica_processes().values()))

    def kill_one() -> None:
        os.kill(replica, signal.SIGKILL)

    tokens, ends, silence_s = asyncio.run(ask_all(cluster, kill_one))
    assert tokens == reference
    assert all(end.finish_reason == pb.FINISH_REASON_LENGTH for end in ends)
    assert any(end.recovered for end in ends)
    print(f"replica killed: longest silence {silence_s:.2f} s")
    cluster.wait_for_replicas(2)


def test_a_killed_pool_loses_no_request_and_no_token(cluster: RunningCluster) -> None:
    import ray

    reference = undisturbed(cluster)

    actor = ray.get_actor(cluster.config.pool_name, namespace=cluster.config.pool.namespace)
    pool = ray.get(actor.status.remote()).process_id

    def kill_pool() -> None:
        os.kill(pool, signal.SIGKILL)

    tokens, ends, silence_s = asyncio.run(ask_all(cluster, kill_pool))
    assert tokens == reference
    assert all(end.recovered for end in ends)
    print(f"pool killed: longest silence {silence_s:.2f} s")
    assert silence_s < SILENCE_S_MAX
    cluster.wait_for_replicas(2)
