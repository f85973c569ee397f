"""Proves: messages over a stream arrive whole, once and in order, or both sides learn that it is
lost; what cannot be sent or read is a typed error at once; and a stranger is neither answered nor
listened to, on both sides, while the cluster's own processes are served on.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec.msgpack import Decoder

from cluster.transport import endpoint as endpoint_module, stream as stream_module
from cluster.transport.credentials import SERVER_NAME, Authority, Key
from cluster.transport.endpoint import Endpoint, Server, connect
from cluster.transport.stream import NotEncodable, Stream, StreamKind, StreamLost
from tests.cluster.wire import until

HOST = "127.0.0.1"
ECHO = StreamKind("Echo", calling=Decoder(list[bytes | int]), called=Decoder(list[bytes | int]))
LIAR = StreamKind("Echo", calling=Decoder(list[bytes | int]), called=Decoder(list[str]))
"""The same stream for a caller that expects something else."""
LAST = StreamKind("Last", calling=Decoder(list[int]), called=Decoder(list[bytes]))
"""The server says its last words and ends the stream."""
LAST_WORDS = [0, 1 << 20, 2 << 20]


class Served:
    """A server that sends back what it gets, and callers of it."""

    def __init__(self) -> None:
        self.server = Server({ECHO: self._serve, LAST: self._end})
        self.key = Key()
        self.streams: list[Stream] = []
        self.ended: list[str] = []
        """Names of callers whose stream has ended."""

    async def _serve(self, peer: str, stream: Stream) -> None:
        try:
            async for messages in stream.frames():
                stream.send(*messages)
        finally:
            self.ended.append(peer)

    async def _end(self, _peer: str, stream: Stream) -> None:
        for size in LAST_WORDS:
            stream.send(bytes(size))

    async def endpoint(self) -> Endpoint:
        return await self.server.endpoint(HOST, self.key.public_pem)

    async def caller(self, kind: StreamKind = ECHO, name: str = "caller") -> Stream:
        self.streams.append(await connect(await self.endpoint(), self.key, kind, name))
        return self.streams[-1]

    async def serves_on(self) -> None:
        stream = None
        while stream is None:
            # On a busy machine a handshake may come too late.
            with contextlib.suppress(OSError):
                stream = await self.caller()
        assert await echoed(stream, 7) == [7]


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    made = Served()
    async with asyncio.timeout(100):
        yield made
        for stream in made.streams:
            await stream.close()
        await made.server.close()


async def echoed(stream: Stream, message: Any) -> list[Any]:
    """What comes back."""
    stream.send(message)
    return await anext(stream.frames())


# --------------------------------------------------------------------------- messages


async def test_what_is_sent_arrives_whole_in_order_and_as_it_was_put_together() -> None:
    async with served() as s:
        stream = await s.caller()
        frames: list[list[Any]] = [[bytes(range(251)) * size] for size in (1, 300, 12_000)]
        frames.append([1, b"two", 3])
        for frame in frames:
            stream.send(*frame)
        receives = stream.frames()
        assert [await anext(receives) for _ in frames] == frames
        # A server's last words arrive before it ends the stream.
        last = await s.caller(LAST)
        assert [len(words) async for frame in last.frames() for words in frame] == LAST_WORDS


@pytest.mark.parametrize("value", [object(), 1 << 70, "\ud800", bytes(1000)])
async def test_what_cannot_be_sent_is_refused_before_it_is(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "FRAME_BYTES_MAX", 1000)
    async with served() as s:
        stream = await s.caller()
        with pytest.raises(NotEncodable):
            stream.send(2, value)
        assert await echoed(stream, 3) == [3]


async def test_a_message_that_was_not_agreed_on_ends_the_stream_on_both_sides() -> None:
    async with served() as s:
        with pytest.raises(StreamLost, match="not agreed on"):
            await echoed(await s.caller(LIAR), 3)
        # The text is none of what the server takes. It says INVALID_ARGUMENT; gRPC tells a caller
        # INTERNAL in its place while its own write is still under way.
        stream = await s.caller(name="text")
        stream.send("text")
        with pytest.raises(StreamLost, match=r"INVALID_ARGUMENT|INTERNAL"):
            await anext(stream.frames())
        assert "text" in s.ended
        await s.serves_on()


@pytest.mark.parametrize("side", ["closed", "cancelled", "server"])
async def test_both_sides_learn_of_the_end_of_a_stream(side: str) -> None:
    async with served() as s:
        stream = await s.caller()

        came = asyncio.Event()

        async def read() -> None:
            async for _ in stream.frames():
                came.set()

        reading = asyncio.ensure_future(read())
        stream.send(1)
        await came.wait()
        if side == "closed":
            await stream.close()
            await reading
        else:
            if side == "cancelled":
                stream.cancel()
            else:
                await s.server.close()
            with pytest.raises(StreamLost):
                await reading
        assert stream.lost
        stream.send(2)  # to nobody, and no error
        await until(lambda: s.ended == ["caller"])


# --------------------------------------------------------------------------- strangers


async def refused(channel: grpc.aio.Channel, message: bytes = b"") -> None:
    """The stream ends without an answer."""
    async with channel:
        stream = channel.stream_stream("/lockstep.internal.Transport/Echo")()
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
async def test_a_caller_without_the_right_certificate_is_not_answered(shown: str) -> None:
    async with served() as s:
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


async def test_who_answers_without_the_right_certificate_is_told_nothing(tmp_path: Path) -> None:
    async with served() as s:
        other = Served()
        theirs, ours = await other.endpoint(), await s.endpoint()
        with pytest.raises(OSError, match="no connection"):
            await connect(ours._replace(port=theirs.port), s.key, ECHO, "caller")
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
                await connect(ours._replace(port=port), s.key, ECHO, "caller")
        assert not any(heard)
        await other.server.close()


async def test_garbage_is_hung_up_on_with_or_without_a_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint_module, "_HANDSHAKE_S", 0.5)
    async with served() as s:
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


async def test_a_thousand_strangers_keep_nobody_out_and_those_beyond_a_bound_make_room_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint_module, "_CONNECTIONS_MAX", 1100)
    monkeypatch.setattr(endpoint_module, "_HANDSHAKE_S", 4.0)
    async with served() as s:
        endpoint = await s.endpoint()
        caller = await s.caller()
        address = endpoint.host, endpoint.port
        strangers = [socket.create_connection(address) for _ in range(1000)]
        await s.serves_on()
        kept_out = False
        while not kept_out:
            # On a busy machine the first of them may have been closed by now.
            strangers += [socket.create_connection(address) for _ in range(150)]
            try:
                await s.caller()
            except OSError:
                kept_out = True
        assert await echoed(caller, 3) == [3], "a caller that is in stays in"
        while True:
            try:
                await s.caller()
            except OSError:
                continue
            break
        for stranger in strangers:
            stranger.close()
