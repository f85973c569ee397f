"""Proves, over real sockets and uvicorn: a request that is over a bound is refused in a sentence,
after no more bytes than the bound, and what is under all bounds is served as ever.

The bytes come from a peer that writes as it likes; the application counts what reaches it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn

from cluster.frontend.proxy import bounded_http
from cluster.frontend.proxy.bounded_http import HEAD_BYTES_MAX, LINE_BYTES_MAX, BoundedHttp

BOUND_S = 30.0
"""Of whatever a test waits for; nothing takes so long."""
GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\n"


@dataclass
class Application:
    """Answers each request with the number of its body's bytes."""

    seen: list[int] = field(default_factory=list)
    left: int = 0
    """Requests whose client was gone before their end."""
    hold: asyncio.Event | None = None
    """Where there is one, an answer begins, and ends when this is set."""
    early: bool = False
    """Answers without reading."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.early:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"early"})
            return
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            size += len(message["body"])
            more = message["more_body"]
        self.seen.append(size)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if self.hold is not None:
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            await self.hold.wait()
        await send({"type": "http.response.body", "body": str(size).encode()})


@dataclass
class Peer:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        return int(status.split()[1]), dict(line.lower().split(": ") for line in lines if line)

    async def answer(self) -> tuple[int, str]:
        """Of a whole request."""
        status, headers = await self.head()
        if "content-length" in headers:
            return status, (await self.reader.readexactly(int(headers["content-length"]))).decode()
        body = await self.reader.readuntil(b"0\r\n\r\n")
        return status, b"".join(body.split(b"\r\n")[1:-2:2]).decode()

    async def refusal(self) -> tuple[int, str]:
        """The status and what it says; the connection ends behind it."""
        status, headers = await self.head()
        assert headers["connection"] == "close"
        body = await self.reader.read()
        return status, json.loads(body)["error"]["message"]


@dataclass
class Server:
    application: Application
    port: int
    peers: list[Peer] = field(default_factory=list)

    async def connect(self) -> Peer:
        self.peers.append(Peer(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.peers[-1]


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Server]:
    application = Application(**settings)
    server = uvicorn.Server(
        uvicorn.Config(
            application, http=BoundedHttp, lifespan="off", log_config=None, access_log=False
        )
    )
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server._serve(sockets=[listening]))
        made = Server(application, listening.getsockname()[1])
        try:
            async with asyncio.timeout(BOUND_S):
                while not server.started:
                    await asyncio.sleep(0)
                yield made
        finally:
            for peer in made.peers:
                peer.writer.close()
            server.should_exit = server.force_exit = True
            await task


def fast(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(bounded_http, name, 0.05)


TOO_LONG = {
    "one header": (GET + b"a: ", b"b", 431, "headers of the request have more than 65536"),
    "many headers": (GET, b"ab: cd\r\n", 431, "headers of the request have more than 65536"),
    "an address": (b"GET /", b"a", 414, "address of the request has more than 16384"),
    "no line": (b"", b"\r\n", 431, "headers of the request have more than 65536"),
    "trailers": (
        POST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\na: ",
        *(b"b", 431, "headers of the request have more than 65536"),
    ),
    "a chunk's extension": (
        POST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n1;a=",
        *(b"b", 431, "headers of the request have more than 65536"),
    ),
}


@pytest.mark.parametrize(("begin", "more", "status", "said"), TOO_LONG.values(), ids=TOO_LONG)
async def test_what_does_not_end_is_refused_after_so_many_bytes(
    begin: bytes, more: bytes, status: int, said: str
) -> None:
    """The peer waits for the answer after twice the bound, and has not ended what it sends."""
    async with serving() as server:
        peer = await server.connect()
        await peer.send(begin + more * (2 * HEAD_BYTES_MAX // len(more)))
        found, message = await peer.refusal()
        assert found == status
        assert said in message
        assert server.application.seen == []


async def send_for_ever(peer: Peer, data: bytes) -> None:
    while True:
        await peer.send(data)


@pytest.mark.parametrize("begin", [GET + b"a: ", b"GET /"])
async def test_of_a_head_without_end_no_more_is_read_than_is_dropped_politely(begin: bytes) -> None:
    async with serving() as server:
        peer = await server.connect()
        await peer.send(begin)
        with pytest.raises(ConnectionError):
            await send_for_ever(peer, b"a" * HEAD_BYTES_MAX)


async def test_a_whole_head_over_the_bound_is_refused_and_one_under_it_is_served() -> None:
    async with serving() as server:
        for size, status in ((HEAD_BYTES_MAX - 100, 200), (HEAD_BYTES_MAX, 431)):
            peer = await server.connect()
            await peer.send(GET + b"a: " + b"b" * size + b"\r\n\r\n")
            assert (await peer.answer())[0] == status
        for size, status in ((LINE_BYTES_MAX - 1, 200), (LINE_BYTES_MAX, 414)):
            peer = await server.connect()
            await peer.send(b"GET /" + b"b" * size + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await peer.answer())[0] == status
        assert server.application.seen == [0, 0]


async def test_requests_on_one_connection_have_a_bound_each() -> None:
    """Together their heads, and their bodies, are far above it."""
    async with serving() as server:
        peer = await server.connect()
        large = GET + b"a: " + b"b" * (HEAD_BYTES_MAX - 100) + b"\r\n\r\n"
        for _ in range(3):
            await peer.send(large)
            assert await peer.answer() == (200, "0")
        body = b"x" * (4 * HEAD_BYTES_MAX)
        for _ in range(2):
            await peer.send(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert await peer.answer() == (200, str(len(body)))
        chunks = b"1\r\nx\r\n" * HEAD_BYTES_MAX + b"0\r\n\r\n"
        await peer.send(POST + b"transfer-encoding: chunked\r\n\r\n" + chunks)
        assert await peer.answer() == (200, str(HEAD_BYTES_MAX))


async def test_pipelined_requests_are_answered_in_turn() -> None:
    async with serving() as server:
        peer = await server.connect()
        await peer.send((POST + b"content-length: 3\r\n\r\nabc") * 3 + GET + b"\r\n")
        assert [await peer.answer() for _ in range(4)] == [(200, "3")] * 3 + [(200, "0")]


@pytest.mark.parametrize("begin", [b"G", GET, GET + b"a", b"\r\n"])
async def test_a_head_that_does_not_end_in_time_is_refused(
    begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast(monkeypatch, "HEAD_S")
    async with serving() as server:
        peer = await server.connect()
        await peer.send(begin)
        status, message = await peer.refusal()
        assert status == 408
        assert "headers of the request did not come within" in message
        # The second head on a connection, too.
        peer = await server.connect()
        await peer.send(GET + b"\r\n")
        assert await peer.answer() == (200, "0")
        await peer.send(begin)
        assert await peer.refusal() == (status, message)


async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    fast(monkeypatch, "HEAD_S")
    async with serving() as server:
        peer = await server.connect()
        assert await peer.reader.read() == b""


async def test_a_body_that_does_not_end_in_time_is_refused_and_its_application_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast(monkeypatch, "BODY_S")
    async with serving() as server:
        peer = await server.connect()
        await peer.send(POST + b"content-length: 3\r\n\r\nab")
        status, message = await peer.refusal()
        assert status == 408
        assert "body of the request did not come within" in message
        while not server.application.left:
            await asyncio.sleep(0)
        assert server.application.seen == []


async def test_a_body_that_does_not_end_behind_its_answer_gets_no_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast(monkeypatch, "BODY_S")
    async with serving(early=True) as server:
        peer = await server.connect()
        await peer.send(POST + b"content-length: 3\r\n\r\nab")
        assert await peer.answer() == (200, "early")
        assert await peer.reader.read() == b""


async def test_bytes_behind_a_request_do_not_cut_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Old clients send an empty line behind a body."""
    fast(monkeypatch, "HEAD_S")
    hold = asyncio.Event()
    async with serving(hold=hold) as server:
        peer = await server.connect()
        await peer.send(POST + b"content-length: 1\r\n\r\na\r\n")
        assert (await peer.head())[0] == 200
        loop = asyncio.get_running_loop()
        # As many timers as the bound would have needed.
        for _ in range(3):
            passed = asyncio.Event()
            loop.call_later(bounded_http.HEAD_S, passed.set)
            await passed.wait()
        hold.set()
        assert (await peer.reader.readuntil(b"0\r\n\r\n")).startswith(b"5\r\nbegun\r\n1\r\n1\r\n")


async def test_what_is_no_http_is_refused_in_the_shape_of_all_errors() -> None:
    async with serving() as server:
        peer = await server.connect()
        await peer.send(b"\x16\x03\x01\x02\x00\r\n\r\n")
        assert await peer.refusal() == (400, "Invalid HTTP request received.")
