"""The gRPC client, for the command line, the tests and every other program.

A stream that breaks is continued and a unary call that breaks is repeated, on the same address or
on the next one, as the `RetryPolicy` says; the output is the one of an undisturbed call. What
cannot be helped is raised as `grpc.RpcError` with the status of the last attempt. docs/clients.md
says how to do the same in another language.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from cluster.client.channel import OPTIONS, Tls
from cluster.client.core import Ask, Core, Emit, Pause, Plan, Read, Run, Step
from cluster.client.retry import RetryPolicy
from protos import lockstep_pb2 as pb

_DEFAULT = RetryPolicy()
T = TypeVar("T")


class _Client:
    """What both clients are made of."""

    _grpc: Any
    """The module that opens channels."""

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

        def open_channel(each: str) -> Any:
            if credentials is None:
                return self._grpc.insecure_channel(each, options=OPTIONS)
            return self._grpc.secure_channel(each, credentials, options=OPTIONS)

        self._core = Core(open_channel, address, api_key, retry)

    @property
    def retries(self) -> int:
        """How often a call was asked again, over all calls so far."""
        return self._core.retries


class Client(_Client):
    """Blocking client; safe to share between threads."""

    _grpc = grpc

    def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> pb.GenerateResponse:
        """The whole answer. `timeout_s` bounds all attempts together.

        Where a seed is needed and none is given, the client draws it.
        """
        return self._run(self._core.generate(request, timeout_s))

    def stream(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> Iterator[pb.GenerateChunk]:
        """Chunks as they come, of several choices mixed; closing the iterator cancels the request.

        `end.recovered` counts the continuations; `end.speculation`, `end.replicas` and the times
        of `end` are those of the last one. `timeout_s` bounds all attempts together.
        """
        run = Run(self._core.stream(request, timeout_s))
        try:
            while (step := run.step) is not None:
                if isinstance(step, Emit):
                    yield step.chunk
                self._do(run, step)
        finally:
            run.close()

    def status(self) -> pb.StatusResponse:
        """Of the first address that answers."""
        return self._run(self._core.status())

    def ready(self) -> bool:
        """Whether a server says that it is ready; False when none can be reached."""
        return self._run(self._core.ready())

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises NotReady."""
        self._run(self._core.wait_until_ready(timeout_s))

    def close(self) -> None:
        for lane in self._core.lanes:
            lane.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _run(self, plan: Plan[T]) -> T:
        run = Run(plan)
        while (step := run.step) is not None:
            self._do(run, step)
        return run.value

    def _do(self, run: Run[Any], step: Step) -> None:
        result: Any = None
        try:
            match step:
                case Ask(method, request, timeout_s):
                    result = method(request, timeout=timeout_s, metadata=self._core.metadata)
                case Read(call):
                    result = next(call, None)
                case Pause(seconds):
                    time.sleep(seconds)
        except grpc.RpcError as error:
            run.throw(error)
        else:
            run.send(result)


class AsyncClient(_Client):
    """The same for asyncio."""

    _grpc = grpc.aio

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> pb.GenerateResponse:
        return await self._run(self._core.generate(request, timeout_s))

    async def stream(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncIterator[pb.GenerateChunk]:
        """Chunks as they come; closing the generator cancels the request."""
        run = Run(self._core.stream(request, timeout_s))
        try:
            while (step := run.step) is not None:
                if isinstance(step, Emit):
                    yield step.chunk
                await self._do(run, step)
        finally:
            run.close()

    async def status(self) -> pb.StatusResponse:
        return await self._run(self._core.status())

    async def ready(self) -> bool:
        return await self._run(self._core.ready())

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Raises NotReady."""
        await self._run(self._core.wait_until_ready(timeout_s))

    async def close(self) -> None:
        for lane in self._core.lanes:
            await lane.channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def _run(self, plan: Plan[T]) -> T:
        run = Run(plan)
        while (step := run.step) is not None:
            await self._do(run, step)
        return run.value

    async def _do(self, run: Run[Any], step: Step) -> None:
        result: Any = None
        try:
            match step:
                case Ask(method, request, timeout_s, stream):
                    call = method(request, timeout=timeout_s, metadata=self._core.metadata)
                    result = call if stream else await call
                case Read(call):
                    chunk = await call.read()
                    result = None if chunk is grpc.aio.EOF else chunk
                case Pause(seconds):
                    await asyncio.sleep(seconds)
        except grpc.RpcError as error:
            run.throw(error)
        else:
            run.send(result)
