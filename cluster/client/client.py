"""The gRPC client, for the command line, the tests and every other program.

A stream that breaks is continued and a unary call that breaks is repeated, as the `RetryPolicy`
says; the output is the one of an undisturbed call. What cannot be helped is raised as
`grpc.RpcError` with the status of the last attempt. docs/clients.md says how to do the same in
another language.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from cluster.client.channel import OPTIONS, Tls
from cluster.client.core import Core
from cluster.client.retry import RetryPolicy
from protos import lockstep_pb2 as pb

_DEFAULT = RetryPolicy()
T = TypeVar("T")


class AsyncClient(Core):
    """For asyncio."""

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy = _DEFAULT,
    ) -> None:
        """`address`: host:port, or any other target of gRPC's.

        Without `tls` the connection, and with it the key, is in plain text. Raises OSError and
        ValueError for bad TLS files.
        """
        super().__init__(_opens(grpc.aio, tls), _Waits(), address, api_key, retry)

    async def close(self) -> None:
        await self.channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()


class Client:
    """The same, blocking; safe to share between threads."""

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy = _DEFAULT,
    ) -> None:
        """As of `AsyncClient`."""
        self._core = Core(_opens(grpc, tls), _Blocks(), address, api_key, retry)

    @property
    def retries(self) -> int:
        """How often a call was asked again, over all calls so far."""
        return self._core.retries

    def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> pb.GenerateResponse:
        """The whole answer. `timeout_s` bounds all attempts together.

        Where a seed is needed and none is given, the client draws it.
        """
        return _run(self._core.generate(request, timeout_s))

    def stream(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> Iterator[pb.GenerateChunk]:
        """Chunks as they come, of several choices mixed; closing the iterator cancels the request.

        `end.recovered` counts the continuations; `end.speculation`, `end.replicas` and the times
        of `end` are those of the last one. `timeout_s` bounds all attempts together.
        """
        chunks = self._core.stream(request, timeout_s)
        try:
            while (chunk := _run(anext(chunks, None))) is not None:
                yield chunk
        finally:
            _run(chunks.aclose())

    def status(self) -> pb.StatusResponse:
        """What the server says of itself."""
        return _run(self._core.status())

    def ready(self) -> bool:
        """Whether the server says that it is ready; False when it cannot be reached."""
        return _run(self._core.ready())

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises NotReady."""
        _run(self._core.wait_until_ready(timeout_s))

    def close(self) -> None:
        self._core.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class _Waits:
    """By the event loop."""

    async def ask(self, method: Any, request: Any, **options: Any) -> Any:
        return await method(request, **options)

    async def read(self, call: Any) -> Any:
        chunk = await call.read()
        return None if chunk is grpc.aio.EOF else chunk

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Blocks:
    """Holds up the thread, so what waits in this way needs no event loop."""

    async def ask(self, method: Any, request: Any, **options: Any) -> Any:
        return method(request, **options)

    async def read(self, call: Any) -> Any:
        return next(call, None)

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)


def _run(blocking: Awaitable[T]) -> T:
    """What a coroutine gives that waits by `_Blocks`: it comes to its end in one go."""
    try:
        blocking.__await__().send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("it waits for an event loop")


def _opens(module: Any, tls: Tls | None) -> Callable[[str], Any]:
    """What opens a channel of this module to an address."""
    credentials = None if tls is None else tls.credentials()

    def open_channel(address: str) -> Any:
        if credentials is None:
            return module.insecure_channel(address, options=OPTIONS)
        return module.secure_channel(address, credentials, options=OPTIONS)

    return open_channel
