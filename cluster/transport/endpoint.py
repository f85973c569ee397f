"""Streams between the processes of one cluster: gRPC under mutual TLS.

A call to a Ray actor costs its process more than a millisecond of CPU, so what comes with every
batch goes over streams. Ray says where they begin and carries the certificates (`credentials`).
Knows no Ray and nothing of what is said.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import grpc

from cluster.transport.credentials import SERVER_NAME, Authority, Key
from cluster.transport.stream import FRAME_BYTES_MAX, Stream, StreamKind, StreamLost

log = logging.getLogger("lockstep.transport")

_SERVICE = "lockstep.internal.Transport"
_PEER = "peer"
"""Name of the metadata that says which caller it is."""
_CONNECT_S = 2.0
"""How long a connection and its handshake may take the caller."""
_HANDSHAKE_S = 5.0
"""A connection that has shown no certificate by then is closed."""
_CONNECTIONS_MAX = 4096
"""Open at once, those still in their handshake included; a further one is closed at once."""
_KEEPALIVE_S = 5.0
"""After so long without a byte the peer's machine is asked for a sign of life, and as long again
for the answer."""
_OPTIONS = (
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
    ("grpc.max_send_message_length", FRAME_BYTES_MAX),
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


Serve = Callable[[str, Stream], Awaitable[None]]
"""Serves the stream of the peer with this name, which ends when it returns and what was sent has
left."""


class Endpoint(NamedTuple):
    """Where a process answers, and what a caller shows there. Holds no secret."""

    host: str
    port: int
    authority: bytes
    """The certificate that has signed both sides', in PEM."""
    certificate: bytes
    """The caller's, in PEM."""


class Server:
    """Serves streams to every process that has a certificate of this one."""

    def __init__(self, kinds: Mapping[StreamKind, Serve]) -> None:
        self._kinds = kinds
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
        """All streams end, and no caller is let in any more."""
        if self._starting is not None:
            server, _ = await self._starting
            await server.stop(None)

    async def _start(self, host: str) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=_called_options())
        handlers = {
            kind.name: grpc.stream_stream_rpc_method_handler(
                functools.partial(self._serve, kind.calling, serve)
            )
            for kind, serve in self._kinds.items()
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, handlers)])
        address = f"[{host}]:0" if ":" in host else f"{host}:0"
        try:
            port = server.add_secure_port(address, self._authority.server_credentials())
        except RuntimeError as error:
            raise OSError(str(error)) from None
        await server.start()
        return server, port

    async def _serve(self, received: Any, serve: Serve, _frames: object, context: Any) -> None:
        stream = Stream(received, context.read, context.write)
        peer = dict(context.invocation_metadata()).get(_PEER, "")
        try:
            # By this the caller knows that it is let in.
            await context.send_initial_metadata(())
            await serve(peer, stream)
            await stream.flush()
        except StreamLost as error:
            log.warning("the stream of %.80s is lost: %s", peer, error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            stream.lost = True


async def connect(endpoint: Endpoint, key: Key, kind: StreamKind, peer: str) -> Stream:
    """A stream of this caller, which calls itself `peer` (ASCII). `key` is the one that the
    endpoint's certificate is for.

    Raises OSError where nothing answers in time, or one of the two does not accept the other.
    """
    host, port, authority, certificate = endpoint
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    credentials = key.channel_credentials(authority, certificate)
    channel = grpc.aio.secure_channel(address, credentials, options=_CALLER_OPTIONS)
    call = channel.stream_stream(f"/{_SERVICE}/{kind.name}")(metadata=((_PEER, peer),))
    try:
        async with asyncio.timeout(_CONNECT_S):
            await call.wait_for_connection()
    except BaseException as error:
        call.cancel()
        await channel.close()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"no connection to {address} in {_CONNECT_S:g} s") from None
        if isinstance(error, grpc.aio.AioRpcError):
            raise ConnectionError(f"no connection to {address}: {error.details()}") from None
        raise
    return Stream(kind.called, call.read, call.write, call.cancel, channel.close)
