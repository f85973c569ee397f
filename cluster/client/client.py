"""The gRPC client, for the command line, the tests and everybody else.

A stream that breaks is continued and a unary call that breaks is repeated, on the same address or
on the next one, as the `RetryPolicy` says; the output is the one of an undisturbed call. What
cannot be helped is raised as `grpc.RpcError` with the status of the last attempt. docs/clients.md
says how to do the same in another language.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc
from grpc_health.v1 import health_pb2

from cluster.client.channel import OPTIONS, Lanes, Tls, left_s
from cluster.client.retry import (
    NO_RETRY,
    Continuation,
    RetryPolicy,
    StreamBroken,
    with_less_time,
    with_seed,
)
from protos import lockstep_pb2 as pb

__all__ = ["NO_RETRY", "AsyncClient", "Client", "NotReady", "RetryPolicy", "Tls"]

_DEFAULT = RetryPolicy()
_STATUS_S = 10.0


class NotReady(TimeoutError):
    """No replica was ready in time."""


class Client:
    """Blocking client; safe to share between threads."""

    def __init__(
        self,
        address: str | Sequence[str],
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy = _DEFAULT,
    ) -> None:
        """`address`: host:port, or several that serve the same target; the first is asked first.

        Without `tls` the connection, and with it the key, is in plain text. Raises OSError and
        ValueError for bad TLS files.
        """
        credentials = None if tls is None else tls.credentials()

        def open_channel(each: str) -> grpc.Channel:
            if credentials is None:
                return grpc.insecure_channel(each, options=OPTIONS)
            return grpc.secure_channel(each, credentials, options=OPTIONS)

        self._lanes = Lanes(open_channel, address, api_key, retry)

    @property
    def retries(self) -> int:
        """How often a call was asked again, over all calls so far."""
        return self._lanes.retries

    def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> pb.GenerateResponse:
        """The whole answer. `timeout_s` bounds all attempts together."""
        lanes = self._lanes
        attempts = lanes.attempts(request, timeout_s)
        request = with_seed(request)
        while True:
            lane = lanes.current
            asked = with_less_time(request, attempts.passed_s(time.monotonic()))
            try:
                response: pb.GenerateResponse = lane.stub.Generate(
                    asked, timeout=left_s(attempts, timeout_s), metadata=lanes.metadata
                )
            except grpc.RpcError as error:
                time.sleep(lanes.pause_s(lane, attempts, error, streaming=False))
            else:
                lanes.reached = True
                return response

    def stream(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> Iterator[pb.GenerateChunk]:
        """Chunks as they come; closing the iterator cancels the request.

        `end.recovered` counts the continuations; `end.speculation`, `end.replicas` and the times
        of `end` are those of the last one. `timeout_s` bounds all attempts together.
        """
        lanes = self._lanes
        attempts = lanes.attempts(request, timeout_s)
        whole = Continuation(request)
        while True:
            lane = lanes.current
            call = lane.stub.GenerateStream(
                whole.request(attempts.passed_s(time.monotonic())),
                timeout=left_s(attempts, timeout_s),
                metadata=lanes.metadata,
            )
            broken: grpc.RpcError = StreamBroken()
            try:
                for chunk in call:
                    if (seen := whole.take(chunk)) is not None:
                        lanes.reached = True
                        attempts.progress()
                        yield seen
            except grpc.RpcError as error:
                broken = error
            finally:
                call.cancel()
            if whole.whole:
                return
            if whole.ended:
                raise broken
            time.sleep(lanes.pause_s(lane, attempts, broken, streaming=True))

    def status(self) -> pb.StatusResponse:
        """Of the first address that answers."""
        failed: grpc.RpcError | None = None
        for lane in self._lanes:
            try:
                status: pb.StatusResponse = lane.stub.Status(
                    pb.StatusRequest(), timeout=_STATUS_S, metadata=self._lanes.metadata
                )
            except grpc.RpcError as error:
                failed = failed or error
            else:
                self._lanes.reached = True
                return status
        assert failed is not None
        raise failed

    def ready(self) -> bool:
        """Whether a server says that it is ready; False when none can be reached."""
        request = health_pb2.HealthCheckRequest()
        for lane in self._lanes:
            try:
                answer = lane.health.Check(
                    request, timeout=_STATUS_S, metadata=self._lanes.metadata
                )
            except grpc.RpcError:
                continue
            self._lanes.reached = True
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return True
        return False

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises NotReady."""
        deadline_s = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() > deadline_s:
                raise NotReady(f"no replica was ready within {timeout_s:.0f} s")
            time.sleep(0.1)

    def close(self) -> None:
        for lane in self._lanes:
            lane.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio."""

    def __init__(
        self,
        address: str | Sequence[str],
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: RetryPolicy = _DEFAULT,
    ) -> None:
        """As `Client`."""
        credentials = None if tls is None else tls.credentials()

        def open_channel(each: str) -> grpc.aio.Channel:
            if credentials is None:
                return grpc.aio.insecure_channel(each, options=OPTIONS)
            return grpc.aio.secure_channel(each, credentials, options=OPTIONS)

        self._lanes = Lanes(open_channel, address, api_key, retry)

    @property
    def retries(self) -> int:
        """How often a call was asked again, over all calls so far."""
        return self._lanes.retries

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> pb.GenerateResponse:
        lanes = self._lanes
        attempts = lanes.attempts(request, timeout_s)
        request = with_seed(request)
        while True:
            lane = lanes.current
            asked = with_less_time(request, attempts.passed_s(time.monotonic()))
            try:
                response: pb.GenerateResponse = await lane.stub.Generate(
                    asked, timeout=left_s(attempts, timeout_s), metadata=lanes.metadata
                )
            except grpc.RpcError as error:
                await asyncio.sleep(lanes.pause_s(lane, attempts, error, streaming=False))
            else:
                lanes.reached = True
                return response

    async def stream(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncIterator[pb.GenerateChunk]:
        """Chunks as they come; closing the generator cancels the request."""
        lanes = self._lanes
        attempts = lanes.attempts(request, timeout_s)
        whole = Continuation(request)
        while True:
            lane = lanes.current
            call = lane.stub.GenerateStream(
                whole.request(attempts.passed_s(time.monotonic())),
                timeout=left_s(attempts, timeout_s),
                metadata=lanes.metadata,
            )
            broken: grpc.RpcError = StreamBroken()
            try:
                async for chunk in call:
                    if (seen := whole.take(chunk)) is not None:
                        lanes.reached = True
                        attempts.progress()
                        yield seen
            except grpc.RpcError as error:
                broken = error
            finally:
                call.cancel()
            if whole.whole:
                return
            if whole.ended:
                raise broken
            await asyncio.sleep(lanes.pause_s(lane, attempts, broken, streaming=True))

    async def status(self) -> pb.StatusResponse:
        """Of the first address that answers."""
        failed: grpc.RpcError | None = None
        for lane in self._lanes:
            try:
                status: pb.StatusResponse = await lane.stub.Status(
                    pb.StatusRequest(), timeout=_STATUS_S, metadata=self._lanes.metadata
                )
            except grpc.RpcError as error:
                failed = failed or error
            else:
                self._lanes.reached = True
                return status
        assert failed is not None
        raise failed

    async def ready(self) -> bool:
        """Whether a server says that it is ready; False when none can be reached."""
        request = health_pb2.HealthCheckRequest()
        for lane in self._lanes:
            try:
                answer = await lane.health.Check(
                    request, timeout=_STATUS_S, metadata=self._lanes.metadata
                )
            except grpc.RpcError:
                continue
            self._lanes.reached = True
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return True
        return False

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Raises NotReady."""
        deadline_s = time.monotonic() + timeout_s
        while not await self.ready():
            if time.monotonic() > deadline_s:
                raise NotReady(f"no replica was ready within {timeout_s:.0f} s")
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        for lane in self._lanes:
            await lane.channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()
