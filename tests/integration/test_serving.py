"""Proves, through real gRPC on a real Ray: answers equal plain decoding, whatever else goes on."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from cluster.client import AsyncClient, Client
from protos import lockstep_pb2 as pb
from protos import lockstep_pb2_grpc
from tests.cluster.frontend.test_grpc_api import INVALID
from tests.integration.conftest import Expected, RunningCluster

pytestmark = pytest.mark.ray

CALL_S = 120.0
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


def test_unary_equals_plain_decoding(client: Client, expected: Expected) -> None:
    answer = client.generate(pb.GenerateRequest(prompt=PROMPTS[0], max_new_tokens=48))
    assert list(answer.token_ids) == expected([PROMPTS[0]], 48)[0]
    assert answer.end.usage.completion_tokens == len(answer.token_ids)


def test_stream_equals_unary(client: Client) -> None:
    request = pb.GenerateRequest(prompt=PROMPTS[1], max_new_tokens=64)
    answer = client.generate(request)
    chunks = list(client.stream(request))
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(answer.token_ids)
    assert chunks[-1].end.finish_reason == answer.end.finish_reason


def test_many_at_once_on_two_replicas(
    cluster: RunningCluster, client: Client, expected: Expected
) -> None:
    async def ask() -> list[pb.GenerateResponse]:
        async with AsyncClient(cluster.address) as many:
            return await asyncio.gather(
                *(
                    many.generate(pb.GenerateRequest(prompt=prompt, max_new_tokens=32))
                    for prompt in PROMPTS
                )
            )

    answers = asyncio.run(ask())
    assert [list(answer.token_ids) for answer in answers] == expected(PROMPTS, 32)
    # One that was silent for too long has joined again, under its name and another suffix.
    names = {name for answer in answers for name in answer.end.replicas}
    assert len({name.rpartition(".")[0] for name in names}) == 2
    assert 0 < status_of(client).acceptance < 1
    until(lambda: idle(client))


def test_many_streams_at_once(cluster: RunningCluster, expected: Expected) -> None:
    async def one(many: AsyncClient, prompt: str) -> list[int]:
        request = pb.GenerateRequest(prompt=prompt, max_new_tokens=32)
        return [token async for chunk in many.stream(request) for token in chunk.token_ids]

    async def ask() -> list[list[int]]:
        async with AsyncClient(cluster.address) as many:
            return await asyncio.gather(*(one(many, prompt) for prompt in PROMPTS[:24]))

    assert asyncio.run(ask()) == expected(PROMPTS[:24], 32)


def test_speculation_and_seeds_change_only_what_they_should(client: Client) -> None:
    def tokens(**options: object) -> list[int]:
        request = pb.GenerateRequest(prompt=PROMPTS[2], max_new_tokens=40, **options)
        return list(client.generate(request).token_ids)

    assert tokens() == tokens(speculation=False) == tokens(draft_len=1)
    sampled = tokens(temperature=1.0, seed=3)
    assert sampled == tokens(temperature=1.0, seed=3, speculation=False)
    assert sampled != tokens(temperature=1.0, seed=4)


def test_each_bad_request_gets_its_status_and_the_server_goes_on(client: Client) -> None:
    for request, field in INVALID:
        for call in (client.generate, lambda request: list(client.stream(request))):
            with pytest.raises(grpc.RpcError) as caught:
                call(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith(f"{field}: ")
    assert client.generate(pb.GenerateRequest(prompt="still here", max_new_tokens=3)).token_ids


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


def cancel_running(
    stub: lockstep_pb2_grpc.LockstepStub, request: pb.GenerateRequest, client: Client
) -> None:
    """Cancel a unary call while it runs; a fast machine may be done before that is seen."""
    for _ in range(10):
        call = stub.Generate.future(request)
        until(lambda call=call: call.done() or status_of(client).running == 1)
        call.cancel()
        if call.cancelled():
            return
    raise AssertionError("it always ended before it was cancelled")


@pytest.mark.parametrize("streaming", [True, False])
def test_a_cancel_by_the_client_frees_the_blocks(
    cluster: RunningCluster, client: Client, streaming: bool
) -> None:
    request = pb.GenerateRequest(
        prompt=PROMPTS[4], max_new_tokens=450, ignore_eos=True, speculation=False
    )
    with Client(cluster.address) as leaving, grpc.insecure_channel(cluster.address) as raw:
        if streaming:
            for _chunk in leaving.stream(request):
                break
        else:
            cancel_running(lockstep_pb2_grpc.LockstepStub(raw), request, client)
    until(lambda: idle(client))
    assert status_of(client).requests_finished > 0


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


def test_http(cluster: RunningCluster, expected: Expected) -> None:
    assert urllib.request.urlopen(f"{cluster.http}/healthz", timeout=CALL_S).status == 200
    assert urllib.request.urlopen(f"{cluster.http}/readyz", timeout=CALL_S).status == 200

    def post(body: bytes) -> dict[str, object]:
        request = urllib.request.Request(
            f"{cluster.http}/v1/generate", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            read: dict[str, object] = json.load(answer)
            return read

    answer = post(json.dumps({"prompt": PROMPTS[0], "max_new_tokens": 32}).encode())
    assert answer["token_ids"] == expected([PROMPTS[0]], 32)[0]
    for body in (b'{"prompt": ""}', b'{"prompts": "x"}', b"{", b"[]"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(body)
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
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == plain.text
    with pytest.raises(urllib.error.HTTPError) as caught:
        post("chat/completions", messages=[{"role": "user", "content": "x"}])
    assert json.load(caught.value)["error"]["param"] == "messages"


def test_a_second_thread_of_one_client_is_served_too(client: Client) -> None:
    answers: list[pb.GenerateResponse] = []

    def ask() -> None:
        answers.append(client.generate(pb.GenerateRequest(prompt="x", max_new_tokens=4)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(answers) == 4
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
