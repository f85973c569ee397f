"""Proves, through real gRPC on a real Ray: answers equal plain decoding, whatever else goes on."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from random import Random

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from benchmarks.soak import cancel_many, left_over
from cluster.client import AsyncClient, Client
from protos import lockstep_pb2 as pb
from tests.integration.conftest import Expected, RunningCluster

pytestmark = pytest.mark.ray

CALL_S = 120.0
CANCELS = 300
PROMPTS = [f"the quick {'brown ' * (n % 7)}fox number {n}" for n in range(64)]


def until(condition: Callable[[], bool], bound_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.005)


def status_of(client: Client, bound_s: float = 30.0) -> pb.StatusResponse:
    """On a busy machine the pool may be late with an answer."""
    deadline_s = time.monotonic() + bound_s
    while True:
        try:
            return client.status()
        except grpc.RpcError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(0.05)


def idle(client: Client) -> bool:
    """Whether every KV block is free and nobody waits."""
    status = status_of(client)
    free = all(replica.kv_blocks_free == replica.kv_blocks for replica in status.replicas)
    return free and status.waiting == 0 and status.running == 0


def test_many_at_once_on_two_replicas_equal_plain_decoding(
    cluster: RunningCluster, client: Client, expected: Expected
) -> None:
    async def one(many: AsyncClient, number: int) -> tuple[list[int], list[str]]:
        request = pb.GenerateRequest(prompt=PROMPTS[number], max_new_tokens=32)
        if number % 2:
            answer = await many.generate(request)
            assert answer.end.usage.completion_tokens == len(answer.token_ids)
            return list(answer.token_ids), list(answer.end.replicas)
        chunks = [chunk async for chunk in many.stream(request)]
        return [token for chunk in chunks for token in chunk.token_ids], [*chunks[-1].end.replicas]

    async def ask() -> list[tuple[list[int], list[str]]]:
        async with AsyncClient(cluster.address) as many:
            return await asyncio.gather(*(one(many, number) for number in range(len(PROMPTS))))

    answers = asyncio.run(ask())
    assert [tokens for tokens, _ in answers] == expected(PROMPTS, 32)
    # One that was silent for too long has joined again, under its name and another suffix.
    names = {name.rpartition(".")[0] for _, replicas in answers for name in replicas}
    assert len(names) == 2
    assert 0 < status_of(client).acceptance < 1
    until(lambda: idle(client))


def test_speculation_and_seeds_change_only_what_they_should(client: Client) -> None:
    def tokens(**options: object) -> list[int]:
        request = pb.GenerateRequest(prompt=PROMPTS[2], max_new_tokens=40, **options)
        return list(client.generate(request).token_ids)

    assert tokens() == tokens(speculation=False) == tokens(draft_len=1)
    sampled = tokens(temperature=1.0, seed=3)
    assert sampled == tokens(temperature=1.0, seed=3, speculation=False)
    assert sampled != tokens(temperature=1.0, seed=4)


def test_a_stop_string_across_chunks(client: Client) -> None:
    request = pb.GenerateRequest(prompt=PROMPTS[3], max_new_tokens=100, ignore_eos=True)
    text = client.generate(request).text
    third = len(text) // 3
    stop = text[third : third + 5]
    request.stop.append(stop)
    answer = client.generate(request)
    chunks = list(client.stream(request))
    assert answer.text == text[: text.index(stop)]
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert chunks[-1].end.stop == stop
    until(lambda: idle(client))


def test_hundreds_of_cancels_at_random_moments_leave_nothing_over(
    cluster: RunningCluster, expected: Expected
) -> None:
    """The same code as `python -m benchmarks.soak --cancels 1000`."""
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
    assert left == {"waiting": 0, "running": 0, "residents": 0, "kv_blocks": 0}
    assert again == expected(["after"], 20)[0]


def test_a_deadline_is_enforced_with_the_tokens_so_far(client: Client, expected: Expected) -> None:
    request = pb.GenerateRequest(prompt=PROMPTS[5], max_new_tokens=450, ignore_eos=True)
    tokens: list[int] = []

    def read() -> float:
        tokens.clear()
        started_s = time.monotonic()
        for chunk in client.stream(request):
            tokens.extend(chunk.token_ids)
        return time.monotonic() - started_s

    # What it takes on this machine, so that its deadline lies in its middle on any.
    request.timeout_s = min(read() for _ in range(3)) / 4
    with pytest.raises(grpc.RpcError) as caught:
        read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    plain = expected([PROMPTS[5]], 450)[0]
    assert len(tokens) < 450
    assert tokens[: len(plain)] == plain[: len(tokens)]
    until(lambda: idle(client))


def test_health_and_reflection(cluster: RunningCluster) -> None:
    with grpc.insecure_channel(cluster.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        named = health_pb2.HealthCheckRequest(service="lockstep.v1.Lockstep")
        answer = health.Check(named, timeout=CALL_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=CALL_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {"lockstep.v1.Lockstep", "grpc.health.v1.Health"} <= set(services)


def test_http(cluster: RunningCluster) -> None:
    assert urllib.request.urlopen(f"{cluster.http}/healthz", timeout=CALL_S).status == 200
    assert urllib.request.urlopen(f"{cluster.http}/readyz", timeout=CALL_S).status == 200
    empty = json.dumps({"model": cluster.config.replica.target, "prompt": ""}).encode()
    for body in (empty, b'{"prompts": "x"}', b"{", b"[]"):
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{cluster.http}/v1/completions", body, headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=CALL_S)
        assert caught.value.code == 400


def test_openai(cluster: RunningCluster, client: Client) -> None:
    """Server-sent events come through Serve's proxy as they are."""
    plain = client.generate(pb.GenerateRequest(prompt=PROMPTS[0], max_new_tokens=32))

    def post(path: str, **fields: object) -> bytes:
        body = json.dumps({"model": cluster.config.replica.target, **fields}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{cluster.http}/v1/{path}", body, headers)
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            read: bytes = answer.read()
            return read

    asked = {"prompt": PROMPTS[0], "max_tokens": 32, "temperature": 0}
    assert json.loads(post("completions", **asked))["choices"][0]["text"] == plain.text
    *events, done, _ = post("completions", **asked, stream=True).decode().split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == plain.text
    with pytest.raises(urllib.error.HTTPError) as caught:
        post("chat/completions", messages=[{"role": "user", "content": "x"}])
    assert json.load(caught.value)["error"]["param"] == "messages"
