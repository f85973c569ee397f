"""Proves: each call over the line gets its own reply, a lost line ends what waits, whoever does not
know the secret is neither answered nor listened to, on both sides, and nobody hears the secret."""

from __future__ import annotations

import asyncio
import hmac
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from cluster.transport import line as line_module
from cluster.transport.line import (
    Connection,
    Door,
    Line,
    LineError,
    LineLost,
    LineRefused,
    LineServer,
    connect,
    connection,
)

HOST = "127.0.0.1"


class Methods:
    """What the server offers, and what was called."""

    def __init__(self) -> None:
        self.called: list[Any] = []
        self.cancelled = 0
        self.forever = asyncio.Event()
        self.connections: list[Connection | None] = []

    async def echo(self, value: Any, delay_s: float = 0.0) -> Any:
        self.called.append(value)
        await asyncio.sleep(delay_s)
        return value

    async def come(self) -> None:
        self.connections.append(connection())

    async def fail(self) -> None:
        raise ValueError("not like this")

    async def hang(self) -> None:
        try:
            await self.forever.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Methods, Door]]:
    methods = Methods()
    names = ("echo", "come", "fail", "hang")
    server = LineServer({name: getattr(methods, name) for name in names})
    async with asyncio.timeout(100):
        yield methods, await server.door(HOST)
        await server.close()


def run(test: Callable[[Methods, Door], Any]) -> None:
    """On Python's event loop, and on the one that Ray gives its actors."""

    async def main() -> None:
        async with served() as (methods, door):
            await test(methods, door)

    for loop_factory in (None, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def shake_hands(door: Door) -> Streams:
    """A caller's part, in crumbs and written down once more."""
    reader, writer = await asyncio.open_connection(door.host, door.port)
    called, caller = await reader.readexactly(32), bytes(range(32))
    for byte in caller + proof(door.secret, b"lockstep line: the caller", called, caller):
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    answer = await reader.readexactly(32)
    assert answer == proof(door.secret, b"lockstep line: the called", called, caller)
    return reader, writer


def proof(secret: bytes, side: bytes, called: bytes, caller: bytes) -> bytes:
    return hmac.new(secret, side + called + caller, "sha256").digest()


@asynccontextmanager
async def answered_by(answer: Callable[[Streams], Any]) -> AsyncIterator[Door]:
    """A door at which somebody else answers."""

    async def handle(*streams: Any) -> None:
        await answer(streams)  # type: ignore[arg-type]
        streams[1].close()

    server = await asyncio.start_server(handle, HOST, 0)
    yield Door(HOST, server.sockets[0].getsockname()[1], b"s" * 32)
    server.close()


async def hears_nothing(reader: asyncio.StreamReader) -> None:
    """The other side hangs up without another byte."""
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await reader.readexactly(1)


async def call(line: Line, name: str, *args: Any, answer_s: float = 1000.0) -> Any:
    return await line.call(name, args, answer_s)


def test_replies_find_their_calls_in_whatever_order_they_come() -> None:
    async def test(methods: Methods, door: Door) -> None:
        line = await connect(door)
        delays = [0.05, 0.0, 0.03, 0.01]
        calls = [call(line, "echo", (number, delay), delay) for number, delay in enumerate(delays)]
        assert await asyncio.gather(*calls) == list(enumerate(delays))
        assert [number for number, _ in methods.called] == [0, 1, 2, 3], "calls keep their order"
        line.close()

    run(test)


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
def test_a_message_of_any_size_arrives_whole(size: int) -> None:
    async def test(_methods: Methods, door: Door) -> None:
        line = await connect(door)
        value = bytes(index % 251 for index in range(size))
        assert await asyncio.gather(*(call(line, "echo", value) for _ in range(3))) == [value] * 3
        line.close()

    run(test)


def test_frames_in_crumbs_are_frames() -> None:
    async def test(methods: Methods, door: Door) -> None:
        reader, writer = await shake_hands(door)
        message = line_module.pack(("echo", ("x",)))
        frames = struct.pack("!IQ", 8 + len(message), 7) + message
        for byte in frames + frames:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        for _ in range(2):
            length, number = struct.unpack("!IQ", await reader.readexactly(12))
            reply = line_module.unpack(await reader.readexactly(length - 8))
            assert (number, reply) == (7, (False, "x"))
        writer.close()

    run(test)


def test_an_error_of_the_method_is_told_and_the_line_stays() -> None:
    async def test(_methods: Methods, door: Door) -> None:
        line = await connect(door)
        with pytest.raises(LineError, match="ValueError: not like this"):
            await call(line, "fail")
        with pytest.raises(LineError, match="KeyError"):
            await call(line, "nothing of this name")
        assert await call(line, "echo", 1) == 1
        line.close()

    run(test)


def test_a_lost_line_ends_the_calls_on_both_sides() -> None:
    async def test(methods: Methods, door: Door) -> None:
        line = await connect(door)
        waiting = asyncio.create_task(call(line, "hang"))
        await call(line, "echo", 1)
        line.close()
        with pytest.raises(LineLost):
            await waiting
        with pytest.raises(LineLost):
            await call(line, "echo", 2)
        while not methods.cancelled:
            await asyncio.sleep(0.001)
        assert methods.called == [1]

    run(test)


def test_a_method_knows_its_callers_connection_and_that_one_when_it_has_ended() -> None:
    async def test(methods: Methods, door: Door) -> None:
        lines = [await connect(door) for _ in range(2)]
        for line in (*lines, lines[0]):
            await call(line, "come")
        first, second, again = methods.connections
        assert first is not None
        assert second is not None
        assert first is again
        assert first is not second
        assert not first.lost
        lines[0].close()
        while not first.lost:
            await asyncio.sleep(0.001)
        assert not second.lost
        assert connection() is None
        lines[1].close()

    run(test)


def test_no_reply_in_time_is_a_lost_call_and_its_late_reply_nobodys() -> None:
    async def test(methods: Methods, door: Door) -> None:
        line = await connect(door)
        with pytest.raises(LineLost, match="in time"):
            await call(line, "hang", answer_s=0.01)
        methods.forever.set()
        assert await call(line, "echo", 2) == 2
        line.close()

    run(test)


@pytest.mark.parametrize(
    "said",
    [b"\0" * 64, b"GET / HTTP/1.1\r\nHost: somewhere else, with a long name of its own\r\n\r\n"],
)
def test_without_the_secret_nothing_is_read(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(methods: Methods, door: Door) -> None:
        def unpack(data: bytes) -> Any:
            raise AssertionError("bytes of a stranger were unpacked")

        monkeypatch.setattr(line_module, "unpack", unpack)
        message = line_module.pack(("echo", ("x",)))
        reader, writer = await asyncio.open_connection(door.host, door.port)
        await reader.readexactly(32)
        writer.write(said + struct.pack("!IQ", 8 + len(message), 1) + message)
        await hears_nothing(reader)
        assert methods.called == []
        with pytest.raises(LineRefused, match="hung up"):
            await connect(door._replace(secret=b"\0" * 32))

    run(test)


def test_whoever_listens_hears_no_secret_and_cannot_say_again_what_he_heard() -> None:
    async def test(methods: Methods, door: Door) -> None:
        heard = {"there": b"", "back": b""}

        async def pump(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
        ) -> None:
            while data := await reader.read(1000):
                heard[way] += data
                writer.write(data)
            writer.close()

        async def listen(streams: Streams) -> None:
            reader, writer = await asyncio.open_connection(door.host, door.port)
            await asyncio.gather(
                pump(streams[0], writer, "there"), pump(reader, streams[1], "back")
            )

        async with answered_by(listen) as middle:
            line = await connect(middle._replace(secret=door.secret))
            assert await call(line, "echo", "a word") == "a word"
            line.close()
        assert b"a word" in heard["there"], "this much is in the open"
        for words in heard.values():
            assert door.secret[:8] not in words
        reader, writer = await asyncio.open_connection(door.host, door.port)
        nonce = await reader.readexactly(32)
        assert nonce != heard["back"][:32]
        writer.write(heard["there"])
        await hears_nothing(reader)
        assert methods.called == ["a word"]

    run(test)


@pytest.mark.parametrize("with_own_proof", [False, True])
def test_whoever_answers_without_the_secret_is_told_nothing(with_own_proof: bool) -> None:
    """Also if he sends back the very proof that he was given, with the same random bytes."""

    async def test(_methods: Methods, _door: Door) -> None:
        more: list[bytes] = []

        async def answer(streams: Streams) -> None:
            reader, writer = streams
            writer.write(b"n" * 32)
            said = await reader.readexactly(64)
            writer.write(said[32:] if with_own_proof else b"\0" * 32)
            more.append(await reader.read())

        async with answered_by(answer) as door:
            with pytest.raises(LineRefused, match="does not know the secret"):
                await connect(door)
            while not more:
                await asyncio.sleep(0.001)
        assert more == [b""]

    run(test)


def test_silence_in_the_handshake_ends_it_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "_CONNECT_S", 0.05)
    monkeypatch.setattr(line_module, "_PROOF_S", 0.05)

    async def test(_methods: Methods, door: Door) -> None:
        gone: list[bytes] = []

        async def answer(streams: Streams) -> None:
            gone.append(await streams[0].read())

        async with answered_by(answer) as silent:
            with pytest.raises(TimeoutError, match=HOST):
                await connect(silent)
            while not gone:
                await asyncio.sleep(0.001)
        reader, writer = await asyncio.open_connection(door.host, door.port)
        await reader.readexactly(32)
        writer.write(b"x" * 63)
        await hears_nothing(reader)

    run(test)


def test_a_line_in_use_outlives_the_time_for_the_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "_PROOF_S", 0.5)

    async def test(_methods: Methods, door: Door) -> None:
        line = await connect(door)
        assert await call(line, "echo", 1, 0.6) == 1
        line.close()

    run(test)


def test_a_frame_beyond_the_bound_ends_the_connection() -> None:
    async def test(_methods: Methods, door: Door) -> None:
        for length in (0, 7, 2**32 - 1):
            reader, writer = await shake_hands(door)
            writer.write(struct.pack("!IQ", length, 1))
            await hears_nothing(reader)

    run(test)


def test_a_door_in_a_log_shows_no_secret() -> None:
    door = Door(HOST, 1234, b"the secret")
    assert repr(door) == str(door) == f"Door({HOST}:1234)"


def test_a_door_that_is_closed_says_so() -> None:
    async def test() -> None:
        server = LineServer({})
        door = await server.door(HOST)
        assert await server.door(HOST) == door, "one door, however often it is asked for"
        await server.close()
        with pytest.raises(ConnectionRefusedError):
            await connect(door)
        # Not an address of this machine.
        with pytest.raises(OSError, match=r"203\.0\.113\.1"):
            await LineServer({}).door("203.0.113.1")

    for loop_factory in (None, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test())
