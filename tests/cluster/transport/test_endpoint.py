"""Proves: each call over a stream gets its own reply, a lost stream ends what waits, what cannot be
sent or read is a typed error at once, and a stranger is neither answered nor listened to, on both
sides, while the cluster's own processes are served on.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from cluster.transport import endpoint as endpoint_module
from cluster.transport.codec import MESSAGE_BYTES_MAX, NotEncodable, Signature
from cluster.transport.credentials import SERVER_NAME, Authority, Key
from cluster.transport.endpoint import (
    CallFailed,
    Connection,
    ConnectionLost,
    Endpoint,
    Peer,
    Server,
    calling_peer,
    connect,
)

HOST = "127.0.0.1"
SIGNATURES = {
    "echo": Signature(tuple[bytes | int, float], bytes | int),
    "come": Signature(tuple[()], None),
    "fail": Signature(tuple[()], None),
    "hang": Signature(tuple[()], None),
    "unsayable": Signature(tuple[()], Any),
    "large": Signature(tuple[()], bytes),
}


class Methods:
    """What the server offers, and what was called."""

    def __init__(self) -> None:
        self.called: list[Any] = []
        self.cancelled = 0
        self.peers: list[Peer | None] = []

    async def echo(self, value: Any, delay_s: float) -> Any:
        self.called.append(value)
        await asyncio.sleep(delay_s)
        return value

    async def come(self) -> None:
        self.peers.append(calling_peer())

    async def fail(self) -> None:
        raise ValueError("not like this")

    async def hang(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def unsayable(self) -> Any:
        return object()

    async def large(self) -> bytes:
        return bytes(MESSAGE_BYTES_MAX)


class Served:
    """A server, and callers of it."""

    def __init__(self) -> None:
        self.methods = Methods()
        named = {name: getattr(self.methods, name) for name in SIGNATURES}
        self.server = Server(SIGNATURES, named)
        self.key = Key()
        self.connections: list[Connection] = []

    async def endpoint(self) -> Endpoint:
        return await self.server.endpoint(HOST, self.key.public_pem)

    async def caller(self) -> Connection:
        self.connections.append(await connect(await self.endpoint(), self.key, SIGNATURES))
        return self.connections[-1]

    async def serves_on(self) -> None:
        assert await call(await self.caller(), "echo", 7, 0.0) == 7


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    made = Served()
    async with asyncio.timeout(100):
        yield made
        for connection in made.connections:
            await connection.close()
        await made.server.close()


def run(test: Callable[[Served], Any]) -> None:
    """On the event loop that Ray gives its actors."""

    async def main() -> None:
        async with served() as made:
            await test(made)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def call(caller: Connection, name: str, *args: Any, answer_s: float = 90.0) -> Any:
    return await caller.call(name, args, answer_s)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


# --------------------------------------------------------------------------- calls


def test_replies_find_their_calls_in_whatever_order_they_come() -> None:
    async def test(s: Served) -> None:
        caller = await s.caller()
        delays = [0.05, 0.0, 0.03, 0.01]
        calls = [call(caller, "echo", number, delay) for number, delay in enumerate(delays)]
        assert await asyncio.gather(*calls) == list(range(4))
        assert s.methods.called == list(range(4)), "calls keep their order"

    run(test)


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
def test_a_message_of_any_size_arrives_whole(size: int) -> None:
    async def test(s: Served) -> None:
        caller = await s.caller()
        value = bytes(index % 251 for index in range(size))
        calls = [call(caller, "echo", value, 0.0) for _ in range(3)]
        assert await asyncio.gather(*calls) == [value] * 3

    run(test)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("fail", (), "ValueError: not like this"),
        ("nothing", (), "KeyError"),
        ("echo", ("text", 0.0), "NotDecodable"),
        ("echo", (1,), "NotDecodable"),
        ("unsayable", (), "NotEncodable"),
        ("large", (), "NotEncodable"),
    ],
)
def test_a_call_that_fails_says_so_at_once_and_harms_no_other(
    name: str, args: tuple[Any, ...], said: str
) -> None:
    async def test(s: Served) -> None:
        caller = await s.caller()
        other = asyncio.ensure_future(call(caller, "echo", 3, 0.05))
        with pytest.raises(CallFailed, match=said):
            await call(caller, name, *args)
        assert await other == 3

    run(test)


@pytest.mark.parametrize("value", [object(), 1 << 70, bytes(MESSAGE_BYTES_MAX)])
def test_what_cannot_be_sent_is_refused_before_it_is(value: Any) -> None:
    async def test(s: Served) -> None:
        caller = await s.caller()
        with pytest.raises(NotEncodable):
            await call(caller, "echo", value, 0.0)
        assert await call(caller, "echo", 3, 0.0) == 3

    run(test)


def test_a_cancelled_call_ends_alone() -> None:
    async def test(s: Served) -> None:
        caller = await s.caller()
        # So large that it is still on its way.
        calls = [asyncio.ensure_future(call(caller, "echo", bytes(9 << 20), 0.0)) for _ in "abc"]
        await asyncio.sleep(0.001)
        for one in calls[:2]:
            one.cancel()
        assert await calls[2] == bytes(9 << 20)

    run(test)


def test_a_call_without_a_reply_in_time_is_a_lost_one() -> None:
    async def test(s: Served) -> None:
        caller = await s.caller()
        with pytest.raises(ConnectionLost, match="no reply"):
            await call(caller, "hang", answer_s=0.05)
        assert await call(caller, "echo", 3, 0.0) == 3

    run(test)


@pytest.mark.parametrize("side", ["caller", "called"])
def test_a_lost_stream_ends_what_waits_on_both_sides(side: str) -> None:
    async def test(s: Served) -> None:
        caller = await s.caller()
        await call(caller, "come")
        waiting = asyncio.ensure_future(call(caller, "hang"))
        await asyncio.sleep(0.05)
        await (caller.close() if side == "caller" else s.server.close())
        with pytest.raises(ConnectionLost):
            await waiting
        with pytest.raises(ConnectionLost):
            await call(caller, "echo", 3, 0.0)
        await until(lambda: s.methods.cancelled == 1)
        (peer,) = s.methods.peers
        assert peer is not None
        assert peer.lost

    run(test)


# --------------------------------------------------------------------------- strangers


async def refused(channel: grpc.aio.Channel, message: bytes = b"") -> None:
    """The stream ends without an answer."""
    async with channel:
        stream = channel.stream_stream("/lockstep.internal.Transport/Calls")()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await stream.write(message)
            assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is not grpc.StatusCode.OK


def channel_of(endpoint: Endpoint, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    address = f"{endpoint.host}:{endpoint.port}"
    if credentials is None:
        return grpc.aio.insecure_channel(address)
    options = [("grpc.ssl_target_name_override", SERVER_NAME)]
    return grpc.aio.secure_channel(address, credentials, options=options)


@pytest.mark.parametrize("shown", ["nothing", "no certificate", "another authority", "no key"])
def test_a_caller_without_the_right_certificate_is_not_answered(shown: str) -> None:
    async def test(s: Served) -> None:
        endpoint = await s.endpoint()
        stranger, authority = Key(), Authority()
        credentials = {
            "nothing": None,
            "no certificate": grpc.ssl_channel_credentials(endpoint.authority),
            "another authority": stranger.channel_credentials(
                endpoint.authority, authority.certify_caller(stranger.public_pem)
            ),
            # All that went over the network.
            "no key": stranger.channel_credentials(endpoint.authority, endpoint.certificate),
        }[shown]
        await refused(channel_of(endpoint, credentials))
        await s.serves_on()

    run(test)


def test_who_answers_without_the_right_certificate_is_told_nothing(tmp_path: Path) -> None:
    async def test(s: Served) -> None:
        other = Served()
        theirs, ours = await other.endpoint(), await s.endpoint()
        with pytest.raises(OSError, match="no connection"):
            await connect(ours._replace(port=theirs.port), s.key, SIGNATURES)
        # A caller's certificate is good for calling only.
        (tmp_path / "key.pem").write_bytes(s.key.pem)
        (tmp_path / "certificate.pem").write_bytes(ours.certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
        context.set_alpn_protocols(["h2"])
        heard: list[bytes] = []

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.read(1))
            writer.close()

        async with await asyncio.start_server(listen, HOST, 0, ssl=context) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(OSError, match="no connection"):
                await connect(ours._replace(port=port), s.key, SIGNATURES)
        assert not any(heard)
        await other.server.close()

    run(test)


def test_garbage_is_hung_up_on_with_or_without_a_certificate() -> None:
    async def test(s: Served) -> None:
        endpoint = await s.endpoint()
        for garbage in (b"\0" * 4096, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x40\x00" * 99):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            writer.write(garbage)
            # At most an alert of TLS's.
            assert len(await reader.read()) < 100
            writer.close()
        credentials = s.key.channel_credentials(endpoint.authority, endpoint.certificate)
        for garbage in (b"", b"\xc1", pickle.dumps(print)):
            await refused(channel_of(endpoint, credentials), garbage)
        await s.serves_on()

    run(test)


def test_a_thousand_open_connections_keep_nobody_out_and_are_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint_module, "_HANDSHAKE_S", 2.0)

    async def test(s: Served) -> None:
        endpoint = await s.endpoint()
        strangers = [
            await asyncio.open_connection(endpoint.host, endpoint.port) for _ in range(1000)
        ]
        await s.serves_on()
        for reader, writer in strangers:
            assert not await reader.read(1), "hung up on"
            writer.close()
        await s.serves_on()

    run(test)


def test_connections_have_a_bound_and_strangers_make_room_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint_module, "_CONNECTIONS_MAX", 8)
    monkeypatch.setattr(endpoint_module, "_HANDSHAKE_S", 1.0)

    async def test(s: Served) -> None:
        endpoint = await s.endpoint()
        caller = await s.caller()
        strangers = [socket.create_connection((endpoint.host, endpoint.port)) for _ in range(20)]
        with pytest.raises(OSError, match="no connection"):
            await s.caller()
        assert await call(caller, "echo", 3, 0.0) == 3, "who is in stays in"
        while True:
            try:
                await s.caller()
            except OSError:
                continue
            break
        for stranger in strangers:
            stranger.close()

    run(test)
