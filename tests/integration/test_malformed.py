"""Proves: whatever bytes a client sends, it gets a typed status, and the server goes on.

Malformed calls through real gRPC: bytes that are no message, messages that were cut or changed on
the way, fields with wild values, and metadata that means something to Serve; over HTTP, headers
that are no text. None may end as INTERNAL or UNKNOWN, none may hang, and sound calls among them are
answered right: one for each ten of as many malformed calls as MALFORMED says, 1000 if it says
nothing:

    MALFORMED=5000 SEED=1 python -m pytest tests/integration/test_malformed.py

The seed is printed, and drawn where none is given.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import grpc
import pytest
from hypothesis import strategies as st

from cluster.client import Client
from protos import lockstep_pb2 as pb
from tests.chaos.hosted import HostedCluster
from tests.cluster.frontend.fuzz.requests import MESSAGE, drawn
from tests.integration.conftest import Expected

pytestmark = pytest.mark.ray

COUNT = int(os.environ.get("MALFORMED", "1000"))
SEED = int(os.environ.get("SEED") or secrets.randbelow(1 << 32))
SOUND = [f"a sound one, number {number}" for number in range(3)]
HANG_S = 60.0
"""A call that takes longer hangs."""

TYPED = frozenset(
    {
        grpc.StatusCode.OK,  # some are no mistake
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,  # metadata that says that the call was passed on
        grpc.StatusCode.NOT_FOUND,  # metadata that names another application
        grpc.StatusCode.DEADLINE_EXCEEDED,  # the request's own, of a microsecond
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(frozen=True)
class Call:
    method: str
    data: bytes
    metadata: tuple[tuple[str, str | bytes], ...] = ()

    def __repr__(self) -> str:
        return f"Call({self.method!r}, {len(self.data)} bytes {self.data[:200]!r}, {self.metadata})"


# --------------------------------------------------------------------------- what is sent


def changed(data: bytes, at: int, value: int, cut: int) -> bytes:
    """One byte replaced, and so many cut off the end."""
    if data:
        at %= len(data)
        data = data[:at] + bytes([value]) + data[at + 1 :]
    return data[: max(len(data) - cut, 0)]


GENERATE = st.sampled_from(["Lockstep/Generate", "Lockstep/GenerateStream"])
METHODS = st.sampled_from(
    [
        *("Lockstep/Generate", "Lockstep/GenerateStream", "Lockstep/Status", "Lockstep/Nothing"),
        *("Health/Check", "Health/List", "Nothing/Generate"),
    ]
)
METADATA = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(
                [
                    *("application", "request_id", "session_id", "multiplexed_model_id"),
                    *("traceparent", "authorization", "x-forwarded-for", "x"),
                ]
            ),
            st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30),
        ),
        st.tuples(st.just("x-bin"), st.binary(max_size=30)),
    ),
    max_size=3,
).map(tuple)
CHEAP = pb.GenerateRequest(prompt="x", max_new_tokens=1).SerializeToString()

CALLS = st.one_of(
    st.builds(Call, METHODS, st.binary(max_size=60)),
    st.builds(Call, GENERATE, MESSAGE.map(pb.GenerateRequest.SerializeToString)),
    st.builds(
        lambda method, message, *change: Call(
            method, changed(message.SerializeToString(), *change)
        ),
        GENERATE,
        MESSAGE,
        st.integers(0, 10_000),
        st.integers(0, 255),
        st.integers(0, 8),
    ),
    st.builds(Call, GENERATE, st.just(CHEAP), METADATA),
)


# --------------------------------------------------------------------------- what comes back


def status_of(channel: grpc.Channel, call: Call) -> grpc.StatusCode:
    """How a call of bytes ends."""
    package = "grpc.health.v1" if call.method.startswith("Health") else "lockstep.v1"
    make = channel.unary_stream if call.method.endswith("Stream") else channel.unary_unary
    send = make(f"/{package}.{call.method}")
    code, began_s = grpc.StatusCode.OK, time.monotonic()
    try:
        answer = send(call.data, metadata=call.metadata, timeout=2 * HANG_S)
        if not isinstance(answer, bytes):
            list(answer)
    except grpc.RpcError as error:
        code = error.code()
    assert time.monotonic() - began_s < HANG_S, call
    return code


def test_malformed_calls_get_a_status_each_and_harm_nobody(
    cluster: HostedCluster, client: Client, expected: Expected
) -> None:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    print(f"\nSEED={SEED}")
    calls = drawn(CALLS, COUNT, SEED)
    right = expected(SOUND, 16)

    def ask(number: int) -> list[int]:
        request = pb.GenerateRequest(prompt=SOUND[number % len(SOUND)], max_new_tokens=16)
        return list(client.generate(request).token_ids)

    with (
        grpc.insecure_channel(cluster.address, options=options) as channel,
        ThreadPoolExecutor(25) as threads,
        ThreadPoolExecutor(2) as sound,
    ):
        answers = sound.map(ask, range(COUNT // 10))
        found = list(threads.map(partial(status_of, channel), calls))
        assert [call for call, code in zip(calls, found, strict=True) if code not in TYPED] == []
        for number, answer in enumerate(answers):
            assert answer == right[number % len(SOUND)]
    codes = Counter(found)
    print(f"\n{COUNT} calls: {codes}")
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > COUNT / 4
    assert codes[grpc.StatusCode.OK] > 0, "some of them were no mistake"


# --------------------------------------------------------------------------- headers over HTTP


@pytest.mark.parametrize(
    "name", ["x-request-id", "X-Session-Id", "serve_multiplexed_model_id", "x-anything"]
)
def test_a_header_that_is_no_text_is_no_error_of_the_server(
    cluster: HostedCluster, name: str
) -> None:
    body = json.dumps({"model": cluster.config.replica.target, "prompt": "a", "max_tokens": 1})
    lines = [
        b"POST /v1/completions HTTP/1.1",
        *(b"host: localhost", b"connection: close", b"content-type: application/json"),
        b"content-length: %d" % len(body),
        b"%s: \xff\xfe" % name.encode(),
    ]
    with socket.create_connection(
        ("127.0.0.1", cluster.config.server.http_port), HANG_S
    ) as connection:
        connection.sendall(b"\r\n".join([*lines, b"", body.encode()]))
        with connection.makefile("rb") as answer:
            assert answer.readline().split()[1] == b"200", answer.read()
