"""A line between two processes of the cluster: calls and replies as frames on one TCP connection.

A call to a Ray actor costs its process more than a millisecond of CPU. So the calls that come with
every order take this line, and all others stay with Ray, which also says where the line is and what
its secret is. A connection that does not begin with the secret is closed before anything of it is
unpacked. Knows no Ray and nothing of what is said.

A frame: its length after these four bytes, the number of the call, then the packed message: of a
call the method's name and its arguments, of a reply whether it was an error, and the result.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, cast

from cluster.packing import pack, unpack

log = logging.getLogger("lockstep.line")

_HEAD = struct.Struct("!IQ")
"""Length of what follows the length, and the number of the call."""
_LENGTH = 4
_SECRET_BYTES = 32
_FRAME_BYTES_MAX = 1 << 30
_CONNECT_S = 2.0
_SECRET_S = 5.0
"""Whoever has not said the secret by then is hung up on."""

Method = Callable[..., Awaitable[Any]]


class LineLost(ConnectionError):
    """The connection is gone, or no reply came in time; the call may have been carried out."""


class LineError(RuntimeError):
    """The method raised; the message says what."""


class Door(NamedTuple):
    """Where a process answers."""

    host: str
    port: int
    secret: bytes


class _Frames(asyncio.Protocol, ABC):
    """Cuts what comes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked: another event loop's is no subclass.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= _HEAD.size:
            length, number = _HEAD.unpack_from(self._rest)
            end = _LENGTH + length
            if not _HEAD.size <= end <= _FRAME_BYTES_MAX:
                self.hang_up()
                return
            if len(self._rest) < end:
                return
            message = bytes(self._rest[_HEAD.size : end])
            del self._rest[:end]
            self.receive(number, message)

    def send(self, number: int, message: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            length = _HEAD.size - _LENGTH + len(message)
            self.transport.write(_HEAD.pack(length, number) + message)

    @abstractmethod
    def receive(self, number: int, message: bytes) -> None:
        """A whole frame has come."""

    def hang_up(self) -> None:
        self._rest.clear()
        if self.transport is not None:
            self.transport.abort()


# --------------------------------------------------------------------------- the one who is called


class LineServer:
    """Answers calls of the given methods by whoever knows the secret."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._methods = methods
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._server: asyncio.Task[asyncio.Server] | None = None

    async def door(self, host: str) -> Door:
        """Where this process answers; it listens on this address of its own from the first call on.

        Raises OSError when it cannot.
        """
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = loop.create_task(
                loop.create_server(lambda: _Caller(self._methods, self._secret), host, 0)
            )
        try:
            server = await asyncio.shield(self._server)
        except OSError:
            self._server = None
            raise
        return Door(host, server.sockets[0].getsockname()[1], self._secret)

    async def close(self) -> None:
        """Nobody is let in any more."""
        if self._server is not None:
            (await self._server).close()


class _Caller(_Frames):
    """One connection to this process."""

    def __init__(self, methods: Mapping[str, Method], secret: bytes) -> None:
        super().__init__()
        self._methods = methods
        self._secret: bytes | None = secret
        """None once it was said."""
        self._calls: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(_SECRET_S, self._hang_up_on_a_stranger)

    def _hang_up_on_a_stranger(self) -> None:
        if self._secret is not None:
            self.hang_up()

    def data_received(self, data: bytes) -> None:
        if self._secret is not None:
            self._rest += data
            if len(self._rest) < _SECRET_BYTES:
                return
            said, data = bytes(self._rest[:_SECRET_BYTES]), bytes(self._rest[_SECRET_BYTES:])
            self._rest.clear()
            if not hmac.compare_digest(said, self._secret):
                log.warning("a connection without the secret is closed")
                self.hang_up()
                return
            self._secret = None
        super().data_received(data)

    def receive(self, number: int, message: bytes) -> None:
        call = asyncio.get_running_loop().create_task(self._answer(number, message))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def connection_lost(self, _error: Exception | None) -> None:
        for call in self._calls:
            call.cancel()

    async def _answer(self, number: int, message: bytes) -> None:
        try:
            name, args = unpack(message)
            reply = (False, await self._methods[name](*args))
        except Exception as error:
            log.exception("a call over the line failed")
            reply = (True, f"{type(error).__name__}: {error}")
        self.send(number, pack(reply))


# --------------------------------------------------------------------------- the one who calls


class Line(_Frames):
    """A connection to another process; see `connect`."""

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.lost = False

    async def call(self, name: str, args: tuple[Any, ...], answer_s: float) -> Any:
        """Raises LineLost without a reply after `answer_s`, LineError if the method raised."""
        if self.lost:
            raise LineLost("the connection is lost")
        loop = asyncio.get_running_loop()
        self._number += 1
        number = self._number
        reply: asyncio.Future[Any] = loop.create_future()
        self._waiting[number] = reply
        timer = loop.call_later(answer_s, self._silent, number)
        self.send(number, pack((name, args)))
        try:
            failed, result = await reply
        finally:
            timer.cancel()
            self._waiting.pop(number, None)
        if failed:
            raise LineError(result)
        return result

    def receive(self, number: int, message: bytes) -> None:
        reply = self._waiting.get(number)
        # Whoever called may have been cancelled meanwhile.
        if reply is not None and not reply.done():
            reply.set_result(unpack(message))

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(LineLost(f"the connection is lost: {error}"))

    def close(self) -> None:
        """What waits for a reply ends with LineLost."""
        self.hang_up()

    def _silent(self, number: int) -> None:
        reply = self._waiting.get(number)
        if reply is not None and not reply.done():
            reply.set_exception(LineLost("no reply in time"))


async def connect(door: Door) -> Line:
    """Raises OSError when nobody answers there."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_CONNECT_S):
        _, line = await loop.create_connection(Line, door.host, door.port)
    assert line.transport is not None
    line.transport.write(door.secret)
    return line
