"""Calls between two processes of the cluster: one gRPC stream per caller, under mutual TLS.

A call to a Ray actor costs its process more than a millisecond of CPU. So the calls that come with
every batch go over a stream, and all others stay with Ray, which also says where the stream begins
and carries the certificates (see `credentials`). A stream takes a third of the CPU of gRPC's unary
calls. Knows no Ray and nothing of what is said.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import grpc

from cluster.transport.codec import (
    MESSAGE_BYTES_MAX,
    Signatures,
    decode,
    encode,
)
from cluster.transport.credentials import SERVER_NAME, Authority, Key

log = logging.getLogger("lockstep.transport")

_SERVICE, _METHOD = "lockstep.internal.Transport", "Calls"
_CONNECT_S = 2.0
"""How long a connection and its handshake may take the caller."""
_HANDSHAKE_S = 5.0
"""Whoever has no certificate to show by then is hung up on."""
_CONNECTIONS_MAX = 4096
"""Open at once, strangers in their handshake included; a further one is closed at once."""
_KEEPALIVE_S = 5.0
"""After so long without a byte the peer's machine is asked for a sign of life, and as long again
for the answer."""
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX + 1024),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX + 1024),
    ("grpc.keepalive_time_ms", int(_KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(_KEEPALIVE_S * 1000)),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),
)
_CALLER_OPTIONS = (
    *_OPTIONS,
    ("grpc.ssl_target_name_override", SERVER_NAME),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)


def _called_options() -> tuple[tuple[str, int], ...]:
    return (
        *_OPTIONS,
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_S * 1000)),
        ("grpc.max_allowed_incoming_connections", _CONNECTIONS_MAX),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    )


Method = Callable[..., Awaitable[Any]]


class Peer(Protocol):
    """What a method may know of the stream that its caller has to this process."""

    @property
    def lost(self) -> bool:
        """Whether it has ended, as it does at once with the caller's process."""


class ConnectionLost(ConnectionError):
    """The stream is gone, or no reply came in time; the call may have been carried out."""


class CallFailed(RuntimeError):
    """The method raised; the message says what."""


class Endpoint(NamedTuple):
    """Where a process answers, and what a caller shows there. Holds no secret."""

    host: str
    port: int
    authority: bytes
    """The certificate that has signed both sides', in PEM."""
    certificate: bytes
    """The caller's, in PEM."""


class _Writer:
    """Sends messages in order over a stream that takes one at a time."""

    def __init__(self, write: Callable[[bytes], Awaitable[Any]]) -> None:
        self._write = write
        self._messages: deque[bytes] = deque()
        self._busy = False

    async def send(self, message: bytes) -> None:
        """Returns when it is sent, or left to a `send` that is under way."""
        self._messages.append(message)
        if self._busy:
            return
        self._busy = True
        try:
            while self._messages:
                await self._write(self._messages.popleft())
        finally:
            self._busy = False


# --------------------------------------------------------------------------- the one who is called

_peer: ContextVar[Peer | None] = ContextVar("peer", default=None)


def calling_peer() -> Peer | None:
    """That of the call which the running task answers; None for a task that answers none."""
    return _peer.get()


class Server:
    """Answers calls of the given methods by whoever has a certificate of this process."""

    def __init__(self, signatures: Signatures, methods: Mapping[str, Method]) -> None:
        """`methods` by the names in `signatures`."""
        self._signatures = signatures
        self._methods = methods
        self._authority = Authority()
        self._starting: asyncio.Task[tuple[grpc.aio.Server, int]] | None = None

    async def endpoint(self, host: str, public_pem: bytes) -> Endpoint:
        """For the caller with this key; listens on this address of its own from the first call on.

        Raises OSError when it cannot, ValueError for what is no key.
        """
        certificate = self._authority.certify_caller(public_pem)
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start(host))
        try:
            _, port = await asyncio.shield(self._starting)
        except OSError:
            self._starting = None
            raise
        return Endpoint(host, port, self._authority.certificate, certificate)

    async def close(self) -> None:
        """All streams end, and nobody is let in any more."""
        if self._starting is not None:
            server, _ = await self._starting
            await server.stop(None)

    async def _start(self, host: str) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=_called_options())
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})]
        )
        address = f"[{host}]:0" if ":" in host else f"{host}:0"
        try:
            port = server.add_secure_port(address, self._authority.server_credentials())
        except RuntimeError as error:
            raise OSError(str(error)) from None
        await server.start()
        return server, port

    async def _serve(self, _calls: object, context: Any) -> None:
        stream = _Stream(self._signatures, self._methods, context.write)
        _peer.set(stream)
        try:
            # By this the caller knows that it is let in.
            await context.send_initial_metadata(())
            while (message := await context.read()) is not grpc.aio.EOF:
                stream.take(message)
        finally:
            stream.end()


class _Stream:
    """One caller's stream."""

    def __init__(
        self,
        signatures: Signatures,
        methods: Mapping[str, Method],
        write: Callable[[bytes], Awaitable[Any]],
    ) -> None:
        self._signatures = signatures
        self._methods = methods
        self._writer = _Writer(write)
        self._answers: set[asyncio.Task[None]] = set()
        self.lost = False

    def take(self, message: bytes) -> None:
        """Answer a call. Raises NotDecodable for what is none, which ends the stream."""
        number, name, arguments = decode(message)
        answer = asyncio.get_running_loop().create_task(self._answer(number, name, arguments))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    def end(self) -> None:
        self.lost = True
        for answer in self._answers:
            answer.cancel()

    async def _answer(self, number: int, name: str, arguments: Any) -> None:
        try:
            signature = self._signatures[name]
            reply = await self._methods[name](*signature.decode_arguments(arguments))
            message = encode(number, "", reply)
        except Exception as error:
            log.exception("a call of %.40s failed", name)
            message = encode(number, f"{type(error).__name__}: {error}"[:1000], None)
        await self._writer.send(message)


# --------------------------------------------------------------------------- the one who calls


class Connection:
    """A stream to another process; see `connect`."""

    def __init__(self, channel: grpc.aio.Channel, signatures: Signatures) -> None:
        self._channel = channel
        self._signatures = signatures
        self._stream = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")()
        self._writer = _Writer(self._stream.write)
        self._number = 0
        self._waiting: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self.lost = False

    async def open(self) -> None:
        """Returns once each side knows the other. Raises grpc.aio.AioRpcError."""
        await self._stream.wait_for_connection()
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def call(self, name: str, arguments: tuple[Any, ...], answer_s: float) -> Any:
        """Raises ConnectionLost without a reply after `answer_s`, CallFailed if the method raised,
        NotEncodable for arguments that cannot be sent, NotDecodable for a wrong reply."""
        if self.lost:
            raise ConnectionLost("the connection is lost")
        self._number += 1
        number = self._number
        message = encode(number, name, arguments)
        reply: asyncio.Future[tuple[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            async with asyncio.timeout(answer_s):
                self._send(message)
                failed, result = await reply
        except TimeoutError:
            raise ConnectionLost(f"no reply in {answer_s:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if failed:
            raise CallFailed(failed)
        return self._signatures[name].decode_reply(result)

    def _send(self, message: bytes) -> None:
        # By a task of its own: gRPC ends the stream with whoever is cancelled while he writes.
        sending = asyncio.get_running_loop().create_task(self._writer.send(message))
        self._sending.add(sending)
        sending.add_done_callback(self._sent)

    def _sent(self, sending: asyncio.Task[None]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled() and (error := sending.exception()) is not None:
            self._end(str(error))

    async def _read(self) -> None:
        why = "the other side has ended it"
        try:
            while (message := await self._stream.read()) is not grpc.aio.EOF:
                number, failed, result = decode(message)
                reply = self._waiting.get(number)
                # Whoever called may have been cancelled meanwhile.
                if reply is not None and not reply.done():
                    reply.set_result((failed, result))
        except grpc.aio.AioRpcError as error:
            why = f"{error.code().name}: {error.details()}"
        finally:
            self._end(why)

    def _end(self, why: str) -> None:
        self.lost = True
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(ConnectionLost(f"the connection is lost: {why}"))

    async def close(self) -> None:
        """What waits for a reply ends with ConnectionLost."""
        self._end("closed here")
        self._stream.cancel()
        await self._channel.close()


async def connect(endpoint: Endpoint, key: Key, signatures: Signatures) -> Connection:
    """`key` is the one that the endpoint's certificate is for.

    Raises OSError where nobody answers in time, or one of the two does not accept the other.
    """
    host, port, authority, certificate = endpoint
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    credentials = key.channel_credentials(authority, certificate)
    channel = grpc.aio.secure_channel(address, credentials, options=_CALLER_OPTIONS)
    connection = Connection(channel, signatures)
    try:
        async with asyncio.timeout(_CONNECT_S):
            await connection.open()
    except BaseException as error:
        await connection.close()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"no connection to {address} in {_CONNECT_S:g} s") from None
        if isinstance(error, grpc.aio.AioRpcError):
            raise ConnectionError(f"no connection to {address}: {error.details()}") from None
        raise
    return connection
