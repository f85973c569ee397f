"""Proves, through real Serve: what a stranger sends to the ports stops nobody else.

A header without end is refused after some bytes, before it is read as a request. The calls that one
gRPC connection may leave behind by resetting them are few, and no call of another caller ends by
them. A long answer arrives whole, however slowly it is read.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from cluster.client import Client
from cluster.frontend.proxy.bounded_http import HEAD_BYTES_MAX
from cluster.frontend.proxy.limits import STREAMS_MAX
from protos import lockstep_pb2 as pb
from tests.chaos.hosted import HostedCluster

pytestmark = pytest.mark.ray

CALL_S = 120.0


def port_of(cluster: HostedCluster, name: str) -> tuple[str, int]:
    return "127.0.0.1", getattr(cluster.config.server, f"{name}_port")


# --------------------------------------------------------------------------- HTTP


@pytest.mark.parametrize(
    ("begin", "status", "said"),
    [
        (b"GET /healthz HTTP/1.1\r\nhost: localhost\r\na: ", 431, "headers of the request"),
        (b"GET /", 414, "address of the request"),
        (b"\x16\x03\x01\x02\r\n\r\n", 400, "Invalid HTTP request"),
    ],
)
def test_what_does_not_end_is_refused_in_a_sentence(
    cluster: HostedCluster, begin: bytes, status: int, said: str
) -> None:
    with socket.create_connection(port_of(cluster, "http"), timeout=CALL_S) as peer:
        peer.sendall(begin + b"a" * (2 * HEAD_BYTES_MAX))
        # It is not at its end: the answer comes after so many bytes.
        answer = http.client.HTTPResponse(peer)
        answer.begin()
        assert answer.status == status
        assert said in json.load(answer)["error"]["message"]


def test_of_a_header_without_end_no_more_is_read(cluster: HostedCluster) -> None:
    """The proxy closes the connection long before it has 200 MB."""
    part, sent = b"a" * (1 << 20), 0
    with (
        socket.create_connection(port_of(cluster, "http"), timeout=CALL_S) as peer,
        contextlib.suppress(ConnectionError),
    ):
        peer.sendall(b"GET / HTTP/1.1\r\na: ")
        while sent < 200:
            peer.sendall(part)
            sent += 1
    assert sent < 100


def test_a_long_answer_arrives_whole_also_where_it_is_read_slowly(cluster: HostedCluster) -> None:
    """It is longer than what Serve's processes pass on in one message."""
    most = 4 * cluster.config.frontend.message_bytes_max
    prompt = list(range(5, 205))
    body = {"model": cluster.config.model_name, "prompt": [prompt] * 128, "max_tokens": 0}
    body |= {"echo": True, "logprobs": 20, "prompt_logprobs": 20, "return_token_ids": True}
    connection = http.client.HTTPConnection(*port_of(cluster, "http"), timeout=CALL_S)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.status == 200
    with Client(cluster.address) as others:
        # Between two reads there is time for a whole other call.
        got = bytearray(answer.read(1 << 20))
        for _ in range(5):
            request = pb.GenerateRequest(prompt="x", max_new_tokens=4)
            assert others.generate(request).token_ids
            got += answer.read(1 << 20)
    got += answer.read()
    connection.close()
    assert len(got) > most
    choices = json.loads(got)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [prompt] * 128
    assert all(len(choice["prompt_logprobs"]) == len(prompt) for choice in choices)
    assert all(len(choice["logprobs"]["tokens"]) == len(prompt) for choice in choices)


# --------------------------------------------------------------------------- gRPC

_SETTINGS, _RESET, _HEADERS, _DATA = 4, 3, 1, 0
_STREAMS = 3
"""SETTINGS_MAX_CONCURRENT_STREAMS."""
RESETS = 5000


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call_that_is_reset(stream: int) -> bytes:
    """As HTTP/2: headers in HPACK without Huffman's code, the message, the reset."""

    def field(name: bytes, value: bytes) -> bytes:
        return name + bytes([len(value)]) + value

    headers = b"\x83\x86" + field(b"\x04", b"/lockstep.v1.Lockstep/Generate")
    headers += field(b"\x01", b"localhost") + field(b"\x0f\x10", b"application/grpc")
    headers += b"\x00" + field(b"\x02te", b"trailers")
    message = pb.GenerateRequest(prompt="x", max_new_tokens=64).SerializeToString()
    data = b"\x00" + struct.pack(">I", len(message)) + message
    return (
        frame(_HEADERS, 4, stream, headers)
        + frame(_DATA, 1, stream, data)
        + frame(_RESET, 0, stream, struct.pack(">I", 8))
    )


def frames(data: bytearray) -> list[tuple[int, bytes]]:
    """The kinds and payloads of whole frames."""
    found, at = [], 0
    while at + 9 <= len(data):
        size = int.from_bytes(data[at : at + 3], "big")
        found.append((data[at + 3], bytes(data[at + 9 : at + 9 + size])))
        at += 9 + size
    return found


def resets(cluster: HostedCluster) -> None:
    """Many calls on one connection, each reset at once; returns when the proxy has read them."""
    calls = b"".join(call_that_is_reset(2 * number + 1) for number in range(RESETS))
    last = frame(6, 0, 0, b"the last")
    got = bytearray()
    with socket.create_connection(port_of(cluster, "grpc"), timeout=CALL_S) as peer:
        hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(_SETTINGS, 0, 0)
        sending = threading.Thread(target=peer.sendall, args=(hello + calls + last,))
        sending.start()
        # A ping, behind all of them.
        while (6, b"the last") not in (answered := frames(got)):
            more = peer.recv(1 << 16)
            assert more, "the proxy has closed the connection"
            got += more
        sending.join()
    settings = b"".join(payload for kind, payload in answered if kind == _SETTINGS)
    assert struct.pack(">HI", _STREAMS, STREAMS_MAX) in settings


def test_resets_of_one_caller_end_no_call_of_another(cluster: HostedCluster) -> None:
    stop = threading.Event()

    def ask(number: int) -> Counter[str]:
        codes: Counter[str] = Counter()
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(cluster.address, options=options) as channel:
            call = channel.unary_unary("/lockstep.v1.Lockstep/Generate")
            request = pb.GenerateRequest(prompt=f"x{number}", max_new_tokens=4)
            while not stop.is_set():
                try:
                    call(request.SerializeToString(), timeout=CALL_S)
                    codes["OK"] += 1
                except grpc.RpcError as error:
                    codes[error.code().name] += 1
        return codes

    with ThreadPoolExecutor(8) as threads:
        asking = [threads.submit(ask, number) for number in range(8)]
        try:
            for _ in range(3):
                resets(cluster)
        finally:
            stop.set()
        codes = sum((asked.result() for asked in asking), Counter[str]())
    assert codes.keys() == {"OK"}
