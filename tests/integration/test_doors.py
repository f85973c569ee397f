"""Proves, through real gRPC and HTTP: only known callers come in, and refusals say when to return.

Without keys on the cluster of all integration tests; with keys on the real command, `lockstep
serve --keys-file`, which listens to every address of this machine.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from email.message import Message
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from cluster.client import Client
from protos import lockstep_pb2 as pb, lockstep_pb2_grpc
from tests.chaos.hosted import HostedCluster
from tests.integration.conftest import Keyed, other_address

pytestmark = pytest.mark.ray

CALL_S = 60.0
REQUEST = pb.GenerateRequest(prompt="the quick brown fox", max_new_tokens=8, ignore_eos=True)
Metadata = list[tuple[str, str]]


def bearer(key: str) -> Metadata:
    return [("authorization", f"Bearer {key}")]


def refusals(target: str, metadata: Metadata, status: bool = False) -> list[grpc.Call]:
    """How Generate and GenerateStream refuse a request, and `status` this caller."""
    errors: list[grpc.Call] = []
    with grpc.insecure_channel(target) as channel:
        stub = lockstep_pb2_grpc.LockstepStub(channel)
        calls = [(stub.Generate, REQUEST), (stub.GenerateStream, REQUEST)]
        calls += [(stub.Status, pb.StatusRequest())] * status
        for call, request in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call(request, metadata=metadata, timeout=CALL_S))
            errors.append(caught.value)
    return errors


def closed(target: str, metadata: Metadata, why: str) -> None:
    """Whoever calls so is not known, to Status neither; health and reflection are open to all."""
    for error in refusals(target, metadata, status=True):
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert why in error.details()
        assert not any(said in error.details() for _, said in metadata)
    with Client(target) as client:
        assert client.ready()
    with grpc.insecure_channel(target) as channel:
        assert "lockstep.v1.Lockstep" in ProtoReflectionDescriptorDatabase(channel).get_services()


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
    closed(f"{address}:{cluster.config.server.grpc_port}", [], "lockstep keys add")


def test_without_keys_who_passes_on_a_call_is_not_this_machine(cluster: HostedCluster) -> None:
    for name in ("x-forwarded-for", "forwarded", "x-real-ip"):
        for error in refusals(cluster.address, [(name, "127.0.0.1")]):
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
            closed(target, metadata, "authorization: ")
    with Client(keyed.target, keyed.alice) as client:
        assert client.status().ready
    for path in ("healthz", "readyz"):
        with urllib.request.urlopen(f"{keyed.http}/{path}", timeout=CALL_S) as page:
            assert page.status == 200


def test_a_used_up_rate_tells_when_to_come_back_over_grpc_and_http(keyed: Keyed) -> None:
    over = pb.GenerateRequest(prompt="x", max_new_tokens=200, ignore_eos=True)
    # Larger than the whole bucket: since that is full it passes, and leaves a debt of minutes.
    assert len(tokens(keyed.target, bearer(keyed.dave), over)) == 200
    for error in refusals(keyed.target, bearer(keyed.dave)):
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "dave" in error.details()
        assert 100 < retry_after_s(error) < 300
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2}).encode()
    status, headers, _ = post(keyed.http, body, {"authorization": f"Bearer {keyed.dave}"})
    assert status == 429
    assert 100 < int(headers["retry-after"]) < 300
    assert len(tokens(keyed.target, bearer(keyed.alice))) == 8, "others do not pay for it"


def test_the_proxy_takes_no_message_that_is_far_too_long(keyed: Keyed) -> None:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(keyed.target, options=options) as channel:
        stub = lockstep_pb2_grpc.LockstepStub(channel)
        request = pb.GenerateRequest(prompt="x", request_id="y" * (17 << 20))
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(request, metadata=bearer(keyed.alice), timeout=CALL_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in caught.value.details()
