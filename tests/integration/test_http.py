"""Proves, by bytes on sockets through Serve's proxy: however a client reads, stops reading or goes,
every sequence and every block is free again; each answer has one name.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.chaos.hosted import HostedCluster

pytestmark = pytest.mark.ray

BOUND_S = 60.0
"""An answer that takes longer hangs."""


def asked(cluster: HostedCluster, **fields: object) -> bytes:
    plain = {"model": cluster.config.replica.target, "prompt": "the quick", "max_tokens": 2}
    return json.dumps(plain | fields).encode()


def long_stream(cluster: HostedCluster) -> bytes:
    """More of an answer than the buffers on its way hold."""
    fields = {"max_tokens": 450, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 20}
    return asked(cluster, **fields)


def request(
    body: bytes, line: str = "POST /v1/completions", headers: tuple[str, ...] = ()
) -> bytes:
    head = [
        f"{line} HTTP/1.1",
        *("host: localhost", "connection: close", "content-type: application/json"),
        *(f"content-length: {len(body)}", *headers),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


@contextmanager
def connected(cluster: HostedCluster, buffer_bytes: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as made:
        if buffer_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        made.settimeout(BOUND_S)
        made.connect(("127.0.0.1", cluster.config.server.http_port))
        yield made


def rest(connection: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def test_a_reader_that_stops_reading_holds_nothing(cluster: HostedCluster) -> None:
    with connected(cluster, buffer_bytes=4096) as connection:
        connection.sendall(request(long_stream(cluster)))
        assert connection.recv(1024).startswith(b"HTTP/1.1 200")
        cluster.wait_until_idle(BOUND_S)
        # It may read on, to the proper end.
        assert b"data: [DONE]\n\n" in rest(connection)[-64:]


@pytest.mark.parametrize("way", ["goes", "resets", "says no more"])
def test_a_reader_that_goes_holds_nothing(cluster: HostedCluster, way: str) -> None:
    """One that closes its side only gets its answer, or is cut off; it does not hang."""
    stream, whole = long_stream(cluster), asked(cluster, max_tokens=400, ignore_eos=True)
    for body, wait in ((stream, 1), (stream, 1 << 14), (whole, 1)):
        with connected(cluster) as connection:
            connection.sendall(request(body))
            if way == "says no more":
                connection.shutdown(socket.SHUT_WR)
                rest(connection)
                continue
            assert connection.recv(wait)
            if way == "resets":
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    cluster.wait_until_idle(BOUND_S)


def test_a_body_of_all_bytes_that_are_allowed_may_come_slowly(cluster: HostedCluster) -> None:
    most = cluster.config.frontend.message_bytes_max
    for size, status in ((most, b"200"), (most + 1, b"413")):
        data = request(asked(cluster).ljust(size))
        with connected(cluster) as connection:
            for at in range(0, len(data), 1 << 18):
                connection.sendall(data[at : at + (1 << 18)])
            assert rest(connection).split(b" ", 2)[1] == status
    cluster.wait_until_idle(BOUND_S)


@pytest.mark.parametrize("own", ["mine", None])
def test_each_answer_has_one_name(cluster: HostedCluster, own: str | None) -> None:
    """Serve gives it; the client's own if it has one."""
    for line, body, status in (
        ("POST /v1/completions", asked(cluster, stream=True), b"200"),
        ("POST /v1/completions", b"{", b"400"),
        ("GET /nothing", b"", b"404"),
    ):
        with connected(cluster) as connection:
            headers = () if own is None else (f"x-request-id: {own}",)
            connection.sendall(request(body, line, headers))
            head = rest(connection).partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
        assert head[0].split(b" ")[1] == status
        [name] = [each for each in head if each.startswith(b"x-request-id: ")]
        assert name != b"x-request-id: "
        if own is not None:
            assert name == f"x-request-id: {own}".encode()
