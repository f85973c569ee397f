"""What a client does, but for how it waits: the blocking and the asynchronous client are one."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client.retry import (
    RETRY_AFTER_KEY,
    Attempts,
    Continuation,
    RetryPolicy,
    is_repeatable,
    own_error,
    trailing,
    with_less_time,
    with_seed,
)
from protos import lockstep_pb2 as pb, lockstep_pb2_grpc

_STATUS_S = 10.0
_READY_PAUSE_S = 0.1
_OWN_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
)
"""What a client's own gRPC says without any server; all others tell of one."""


class NotReady(TimeoutError):
    """No replica was ready in time."""


class Waits(Protocol):
    """How a client waits: for an answer, for the next message of a stream, for time to pass."""

    async def ask(self, method: Any, request: Any, **options: Any) -> Any: ...

    async def read(self, call: Any) -> Any:
        """None at the stream's end."""
        ...

    async def pause(self, seconds: float) -> None: ...


class Core:
    """Calls to one address, which may be several for gRPC (`ipv4:10.0.0.1:9000,10.0.0.2:9000`, or
    a name): it goes on to the next one when it cannot connect, not when one answers with errors.
    With TLS it must be a name, as a list fails the check of the host name."""

    def __init__(
        self,
        open_channel: Callable[[str], Any],
        waits: Waits,
        address: str,
        api_key: str | None,
        retry: RetryPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.channel = open_channel(address)
        self._stub: Any = lockstep_pb2_grpc.LockstepStub(self.channel)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self.channel)
        self._waits = waits
        self._retry = retry
        self._clock = clock
        # Never in a log or a message: only here and on the wire.
        self._metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._reached = False
        """Whether any server has ever answered."""
        self.retries = 0
        """How often a call was asked again, over all calls so far."""

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> pb.GenerateResponse:
        """The whole answer. `timeout_s` bounds all attempts together."""
        attempts = self._attempts(request, timeout_s)
        request = with_seed(request)
        while True:
            asked = with_less_time(request, attempts.passed_s(self._clock()))
            try:
                response: pb.GenerateResponse = await self._ask(
                    self._stub.Generate, asked, self._left_s(attempts, timeout_s)
                )
            except grpc.RpcError as error:
                broken = error
            else:
                self._reached = True
                return response
            await self._waits.pause(self._pause_s(attempts, broken))

    async def stream(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        """Chunks as they come; closing the generator cancels the request.

        `end.recovered` counts the continuations; `end.speculation`, `end.replicas` and the times
        of `end` are those of the last one. `timeout_s` bounds all attempts together.
        """
        attempts = self._attempts(request, timeout_s)
        whole = Continuation(request)
        while True:
            asked = whole.request(attempts.passed_s(self._clock()))
            left_s = self._left_s(attempts, timeout_s)
            call = self._stub.GenerateStream(asked, timeout=left_s, metadata=self._metadata)
            broken = own_error(
                grpc.StatusCode.UNAVAILABLE, "the stream ended before its last chunk"
            )
            try:
                while (chunk := await self._waits.read(call)) is not None:
                    if (seen := whole.take(chunk)) is not None:
                        self._reached = True
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
            await self._waits.pause(self._pause_s(attempts, broken))

    async def status(self) -> pb.StatusResponse:
        status: pb.StatusResponse = await self._ask(
            self._stub.Status, pb.StatusRequest(), _STATUS_S
        )
        self._reached = True
        return status

    async def ready(self) -> bool:
        """Whether the server says that it is ready; False when it cannot be reached."""
        request = health_pb2.HealthCheckRequest()
        try:
            answer = await self._ask(self._health.Check, request, _STATUS_S)
        except grpc.RpcError:
            return False
        self._reached = True
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Raises NotReady."""
        deadline_s = self._clock() + timeout_s
        while not await self.ready():
            if self._clock() > deadline_s:
                raise NotReady(f"no replica was ready within {timeout_s:.0f} s")
            await self._waits.pause(_READY_PAUSE_S)

    async def _ask(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        return await self._waits.ask(method, request, timeout=timeout_s, metadata=self._metadata)

    def _attempts(self, request: pb.GenerateRequest, timeout_s: float | None) -> Attempts:
        own_s = request.timeout_s if request.HasField("timeout_s") else None
        return Attempts(self._retry, self._clock(), (timeout_s, own_s))

    def _left_s(self, attempts: Attempts, timeout_s: float | None) -> float | None:
        """What the caller's own bound leaves for the next attempt."""
        if timeout_s is None:
            return None
        return max(timeout_s - attempts.passed_s(self._clock()), 0.001)

    def _pause_s(self, attempts: Attempts, error: grpc.RpcError) -> float:
        """Before the next attempt. Raises the error if none is to be made, or DEADLINE_EXCEEDED
        where only the call's own time forbids it."""
        now_s = self._clock()
        answered = error.code() not in _OWN_CODES or trailing(error, RETRY_AFTER_KEY) is not None
        self._reached = self._reached or answered or attempts.served(now_s)
        pause_s = attempts.pause_s(error, now_s, reached=self._reached)
        if pause_s is None:
            if attempts.is_over(now_s) and is_repeatable(error):
                after = f"no time was left to ask again after {error.code().name}"
                raise own_error(grpc.StatusCode.DEADLINE_EXCEEDED, after) from error
            raise error
        self.retries += 1
        return pause_s
