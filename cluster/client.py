"""A small gRPC client, for the command line, the tests and everybody else.

Both clients raise `grpc.RpcError` with the server's status. `wait_until_ready` bounds its wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import lockstep_pb2 as pb
from protos import lockstep_pb2_grpc

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Many streams of one process must not wait for each other on one connection's flow control.
    ("grpc.use_local_subchannel_pool", 1),
)
_STATUS_S = 10.0


class NotReady(TimeoutError):
    """No replica was ready in time."""


class Client:
    """Blocking client; safe to share between threads."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub: Any = lockstep_pb2_grpc.LockstepStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> pb.GenerateResponse:
        response: pb.GenerateResponse = self._stub.Generate(request, timeout=timeout_s)
        return response

    def stream(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> Iterator[pb.GenerateChunk]:
        """Chunks as they come; closing the iterator cancels the request."""
        call = self._stub.GenerateStream(request, timeout=timeout_s)
        try:
            yield from call
        finally:
            call.cancel()

    def status(self) -> pb.StatusResponse:
        status: pb.StatusResponse = self._stub.Status(pb.StatusRequest(), timeout=_STATUS_S)
        return status

    def ready(self) -> bool:
        """Whether the server says that it is ready; False when it cannot be reached."""
        try:
            request = health_pb2.HealthCheckRequest()
            answer = self._health.Check(request, timeout=_STATUS_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises NotReady."""
        deadline_s = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() > deadline_s:
                raise NotReady(f"no replica was ready within {timeout_s:.0f} s")
            time.sleep(0.1)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub: Any = lockstep_pb2_grpc.LockstepStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> pb.GenerateResponse:
        response: pb.GenerateResponse = await self._stub.Generate(request, timeout=timeout_s)
        return response

    async def stream(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncIterator[pb.GenerateChunk]:
        """Chunks as they come; closing the generator cancels the request."""
        call = self._stub.GenerateStream(request, timeout=timeout_s)
        try:
            async for chunk in call:
                yield chunk
        finally:
            call.cancel()

    async def status(self) -> pb.StatusResponse:
        status: pb.StatusResponse = await self._stub.Status(pb.StatusRequest(), timeout=_STATUS_S)
        return status

    async def ready(self) -> bool:
        """Whether the server says that it is ready; False when it cannot be reached."""
        try:
            request = health_pb2.HealthCheckRequest()
            answer = await self._health.Check(request, timeout=_STATUS_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Raises NotReady."""
        deadline_s = time.monotonic() + timeout_s
        while not await self.ready():
            if time.monotonic() > deadline_s:
                raise NotReady(f"no replica was ready within {timeout_s:.0f} s")
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()
