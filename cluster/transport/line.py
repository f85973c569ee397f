"""A line between two processes of the cluster: calls and replies as frames on one TCP connection.

A call to a Ray actor costs its process more than a millisecond of CPU. So the calls that come with
every batch take this line, and all others stay with Ray, which also says where the line is and what
its secret is. Before anything is unpacked each side proves to the other that it knows the secret,
which itself never goes over the line. Knows no Ray and nothing of what is said.

The handshake: 32 random bytes of whoever is called; 32 random bytes of the caller and his proof;
the proof of whoever is called. A proof is the HMAC-SHA256 under the secret of the side's name and
both sides' random bytes (challenge and response as in ISO/IEC 9798-4), so neither an old proof nor
the other side's own is of any use.

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
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, cast

from cluster.transport.packing import pack, unpack

log = logging.getLogger("lockstep.line")

_HEAD = struct.Struct("!IQ")
"""Length of what follows the length, and the number of the call."""
_LENGTH = 4
_SECRET_BYTES = 32
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_CALLER, _CALLED = b"lockstep line: the caller", b"lockstep line: the called"
_FRAME_BYTES_MAX = 1 << 30
_CONNECT_S = 2.0
"""How long a connection and its handshake may take the caller."""
_PROOF_S = 5.0
"""Whoever has not proved by then that he knows the secret is hung up on."""

Method = Callable[..., Awaitable[Any]]


class Connection(Protocol):
    """What a method may know of the connection that its caller has to this process."""

    @property
    def lost(self) -> bool:
        """Whether it has ended, as it does at once with the caller's process."""


class LineLost(ConnectionError):
    """The connection is gone, or no reply came in time; the call may have been carried out."""


class LineRefused(ConnectionError):
    """The other side has not proved that it knows the secret, or does not believe that we do."""


class LineError(RuntimeError):
    """The method raised; the message says what."""


class Door(NamedTuple):
    """Where a process answers."""

    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        """Without the secret, for it may stand in a log."""
        return f"Door({self.host}:{self.port})"


def _proof(secret: bytes, side: bytes, called_nonce: bytes, caller_nonce: bytes) -> bytes:
    return hmac.digest(secret, side + called_nonce + caller_nonce, "sha256")


class _Frames(asyncio.Protocol, ABC):
    """Cuts what comes into the parts of the handshake, and then into frames."""

    def __init__(self, secret: bytes, handshake_bytes: int) -> None:
        """`handshake_bytes`: how many come first."""
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._handshake_bytes = handshake_bytes
        """Of the next part of the handshake; 0 once both sides are known."""
        self._rest = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked: another event loop's is no subclass.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        self._rest += data
        while size := self._handshake_bytes:
            if len(self._rest) < size:
                return
            part = bytes(self._rest[:size])
            del self._rest[:size]
            self._handshake_bytes = self.shake_hands(part)
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

    def write(self, part: bytes) -> None:
        """A part of the handshake."""
        if self.transport is not None:
            self.transport.write(part)

    @abstractmethod
    def shake_hands(self, part: bytes) -> int:
        """A part of the handshake has come; returns how many bytes the next one has.

        Hangs up on whoever does not know the secret.
        """

    @abstractmethod
    def receive(self, number: int, message: bytes) -> None:
        """A whole frame has come."""

    def hang_up(self) -> None:
        self._rest.clear()
        if self.transport is not None:
            self.transport.abort()


# --------------------------------------------------------------------------- the one who is called

_connection: ContextVar[Connection | None] = ContextVar("connection", default=None)


def connection() -> Connection | None:
    """That of the call which the running task answers; None for a task that answers none."""
    return _connection.get()


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
        super().__init__(secret, _NONCE_BYTES + _PROOF_BYTES)
        self._methods = methods
        self._calls: set[asyncio.Task[None]] = set()
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        asyncio.get_running_loop().call_later(_PROOF_S, self._hang_up_on_a_stranger)
        self.write(self._nonce)

    def _hang_up_on_a_stranger(self) -> None:
        if self._handshake_bytes:
            self.hang_up()

    def shake_hands(self, part: bytes) -> int:
        nonce, proof = part[:_NONCE_BYTES], part[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, _CALLER, self._nonce, nonce)):
            log.warning("a connection of somebody who does not know the secret is closed")
            self.hang_up()
            return len(part)
        self.write(_proof(self._secret, _CALLED, self._nonce, nonce))
        return 0

    def receive(self, number: int, message: bytes) -> None:
        call = asyncio.get_running_loop().create_task(self._answer(number, message))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def connection_lost(self, _error: Exception | None) -> None:
        self.lost = True
        for call in self._calls:
            call.cancel()

    async def _answer(self, number: int, message: bytes) -> None:
        _connection.set(self)
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

    def __init__(self, secret: bytes) -> None:
        super().__init__(secret, _NONCE_BYTES)
        self._called_nonce: bytes | None = None
        self.known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once each side knows the other, or with LineRefused."""
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

    def shake_hands(self, part: bytes) -> int:
        if self._called_nonce is None:
            self._called_nonce = part
            self.write(self._nonce + _proof(self._secret, _CALLER, part, self._nonce))
            return _PROOF_BYTES
        proof = _proof(self._secret, _CALLED, self._called_nonce, self._nonce)
        if not hmac.compare_digest(part, proof):
            self._refuse("who answers does not know the secret")
            self.hang_up()
            return len(part)
        if not self.known.done():
            self.known.set_result(None)
        return 0

    def _refuse(self, why: str) -> None:
        if not self.known.done():
            self.known.set_exception(LineRefused(why))

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._refuse("who answers has hung up in the handshake")
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
    """Raises OSError when nobody answers there, LineRefused, an OSError too, if a stranger does."""
    loop = asyncio.get_running_loop()
    line: Line | None = None
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, line = await loop.create_connection(lambda: Line(door.secret), door.host, door.port)
            await line.known
    except BaseException as error:
        if line is not None:
            line.close()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"no line to {door.host}:{door.port} in {_CONNECT_S:g} s") from None
        raise
    return line
