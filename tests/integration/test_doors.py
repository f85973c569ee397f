"""Proves, through real gRPC and HTTP: only known callers come in, and refusals say when to return.

Without keys on the cluster of all integration tests; with keys on the real command, `lockstep
serve --keys-file`, listening to every address of this machine, in a process and a Ray of its own.
"""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from cluster.frontend.admission.keys import add
from protos import lockstep_pb2 as pb, lockstep_pb2_grpc
from tests.chaos.hosted import HostedCluster
from tests.free_ports import free_port
from tests.integration.pairs import write_pair
from tests.serving import lockstep_serve

pytestmark = pytest.mark.ray

CALL_S = 60.0
REQUEST = pb.GenerateRequest(prompt="the quick brown fox", max_new_tokens=8, ignore_eos=True)
Metadata = list[tuple[str, str]]


def other_address() -> str | None:
    """An address of this machine that is not loopback, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if address.startswith("127.") else address


def bearer(key: str) -> Metadata:
    return [("authorization", f"Bearer {key}")]


def refusals(target: str, request: pb.GenerateRequest, metadata: Metadata) -> list[grpc.Call]:
    """How Generate and GenerateStream refuse the request."""
    errors: list[grpc.Call] = []
    with grpc.insecure_channel(target) as channel:
        stub = lockstep_pb2_grpc.LockstepStub(channel)
        for call in (stub.Generate, lambda *a, **o: list(stub.GenerateStream(*a, **o))):
            with pytest.raises(grpc.RpcError) as caught:
                call(request, metadata=metadata, timeout=CALL_S)
            errors.append(caught.value)
    return errors


def tokens(target: str, metadata: Metadata, request: pb.GenerateRequest = REQUEST) -> list[int]:
    with grpc.insecure_channel(target) as channel:
        stub = lockstep_pb2_grpc.LockstepStub(channel)
        return list(stub.Generate(request, metadata=metadata, timeout=CALL_S).token_ids)


def retry_after_s(error: grpc.Call) -> int:
    return int(dict(error.trailing_metadata())["retry-after"])


# --------------------------------------------------------------------------- without keys


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_without_keys_this_machine_is_served(cluster: HostedCluster, host: str) -> None:
    port = cluster.config.server.grpc_port
    assert len(tokens(f"{host}:{port}", [])) == 8


def test_without_keys_no_other_machine_is_served(cluster: HostedCluster) -> None:
    """A call to an address of the network comes from an address of the network."""
    address = other_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    target = f"{address}:{cluster.config.server.grpc_port}"
    for error in refusals(target, REQUEST, []):
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "lockstep keys add" in error.details()
    with grpc.insecure_channel(target) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            lockstep_pb2_grpc.LockstepStub(channel).Status(pb.StatusRequest(), timeout=CALL_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        assert answer.status == answer.SERVING


def test_without_keys_who_passes_on_a_call_is_not_this_machine(cluster: HostedCluster) -> None:
    for name in ("x-forwarded-for", "forwarded", "x-real-ip"):
        for error in refusals(cluster.address, REQUEST, [(name, "127.0.0.1")]):
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    model = cluster.config.replica.target
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": 1}).encode()
    for name in ("x-forwarded-for", "x-real-ip"):
        assert post(cluster.http, body, {name: "127.0.0.1"})[0] == 401
    assert post(cluster.http, body)[0] == 200


def test_without_keys_no_web_page_is_served(cluster: HostedCluster) -> None:
    """Through Serve's proxy, which passes these headers on."""
    body = b'{"prompt": "x"}'
    assert post(cluster.http, body, {"host": "evil.example"})[0] == 421
    assert post(cluster.http, body, {"origin": "http://evil.example"})[0] == 403
    assert post(cluster.http, body, {"content-type": "text/plain"})[0] == 415


# --------------------------------------------------------------------------- with keys


@dataclass(frozen=True)
class Keyed:
    """A server with keys."""

    grpc_port: int
    http_port: int
    alice: str
    """No limits."""
    dave: str
    """50 tokens per minute. For one test only, which would wait until they are there again."""
    log: Path

    @property
    def target(self) -> str:
        return f"{other_address() or '127.0.0.1'}:{self.grpc_port}"

    @property
    def http(self) -> str:
        return f"http://{other_address() or '127.0.0.1'}:{self.http_port}"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    target, draft = write_pair(folder / "pair")
    keys_file, log = folder / "keys.yaml", folder / "log"
    server = Keyed(
        free_port(),
        free_port(),
        alice=add(keys_file, "alice"),
        dave=add(keys_file, "dave", tokens_per_minute=50),
        log=log,
    )
    arguments = [
        *("--verbose", "--device", "cpu", "--target", str(target), "--draft", str(draft)),
        *("--grpc-port", str(server.grpc_port), "--http-port", str(server.http_port)),
        *("--memory", "64MiB", "--http-host", "0.0.0.0", "--keys-file", str(keys_file)),
        *("--served-model-name", "tiny"),
    ]
    with lockstep_serve(arguments, log):
        yield server


def post(
    server: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, Message, Any]:
    headers = {"content-type": "application/json"} | (headers or {})
    request = urllib.request.Request(f"{server}/v1/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.load(error)


def test_who_has_a_key_is_served_from_anywhere_and_nobody_else_is(keyed: Keyed) -> None:
    assert len(tokens(keyed.target, bearer(keyed.alice))) == 8
    for metadata in ([], bearer("lsk_nonsense"), [("authorization", keyed.alice)]):
        for target in (keyed.target, f"localhost:{keyed.grpc_port}"):
            for error in refusals(target, REQUEST, metadata):
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                assert error.details().startswith("authorization: ")
                assert keyed.alice not in error.details()


def test_status_needs_a_key_health_and_reflection_do_not(keyed: Keyed) -> None:
    with grpc.insecure_channel(keyed.target) as channel:
        stub = lockstep_pb2_grpc.LockstepStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Status(pb.StatusRequest(), timeout=CALL_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        status = stub.Status(pb.StatusRequest(), metadata=bearer(keyed.alice), timeout=CALL_S)
        assert status.ready
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        assert answer.status == answer.SERVING
        assert "lockstep.v1.Lockstep" in ProtoReflectionDescriptorDatabase(channel).get_services()
    for path in ("healthz", "readyz"):
        with urllib.request.urlopen(f"{keyed.http}/{path}", timeout=CALL_S) as page:
            assert page.status == 200


def test_a_used_up_rate_tells_when_to_come_back_over_grpc_and_http(keyed: Keyed) -> None:
    over = pb.GenerateRequest(prompt="x", max_new_tokens=200, ignore_eos=True)
    # Larger than the whole bucket: since that is full it passes, and leaves a debt of minutes.
    assert len(tokens(keyed.target, bearer(keyed.dave), over)) == 200
    for error in refusals(keyed.target, REQUEST, bearer(keyed.dave)):
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "dave" in error.details()
        assert 100 < retry_after_s(error) < 300
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2}).encode()
    status, headers, _ = post(keyed.http, body, {"authorization": f"Bearer {keyed.dave}"})
    assert status == 429
    assert 100 < int(headers["retry-after"]) < 300
    assert len(tokens(keyed.target, bearer(keyed.alice))) == 8, "others do not pay for it"


def test_the_frontend_refuses_a_long_message_by_name_and_the_proxy_takes_no_longer_one(
    keyed: Keyed,
) -> None:
    def refused(size: int) -> grpc.Call:
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(keyed.target, options=options) as channel:
            stub = lockstep_pb2_grpc.LockstepStub(channel)
            request = pb.GenerateRequest(prompt="x", request_id="y" * size)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Generate(request, metadata=bearer(keyed.alice), timeout=CALL_S)
            return caught.value

    by_us = refused(5 << 20)
    assert by_us.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert by_us.details().startswith("request: ")
    by_grpc = refused(17 << 20)
    assert by_grpc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in by_grpc.details()


def test_no_key_and_no_prompt_stands_in_the_servers_log(keyed: Keyed) -> None:
    mark = "xyzzyplugh"
    tokens(keyed.target, bearer(keyed.alice), pb.GenerateRequest(prompt=mark, max_new_tokens=2))
    refusals(keyed.target, pb.GenerateRequest(prompt=mark, top_k=-1), bearer(keyed.alice))
    refusals(keyed.target, pb.GenerateRequest(prompt=mark), bearer(f"{keyed.alice}{mark}"))
    post(keyed.http, f'{{"{mark}": 1'.encode(), {"authorization": f"Bearer {keyed.alice}"})
    log = keyed.log.read_text(errors="replace")
    assert "lockstep" in log
    for secret in (mark, keyed.alice, keyed.dave):
        assert secret not in log
