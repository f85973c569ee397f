"""Speaks to clients: checks, tokenizes, submits to the pool, streams text. Knows no Ray.

The methods with capital names are the RPCs; Serve's proxy calls them by name and gives them the
call's context. A call that fails sets its status on the context and returns, so that a client's
mistake is no stack trace in the server's log. Prompts and outputs are never logged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from grpc import StatusCode
from grpc_health.v1 import health_pb2

from cluster.config import ClusterConfig
from cluster.metrics import IngressMeter
from cluster.pool_link import LiveRequest, PoolLink
from cluster.protocol import PoolPort, PoolUnreachable
from cluster.target_text import TargetText
from cluster.text import TextStream
from cluster.wire import (
    Ask,
    Refusal,
    check_message,
    refusal_of_error,
    refusal_of_finish,
    refusal_of_reject,
    rename_field,
    to_ask,
    to_end,
    to_status,
)
from protos import lockstep_pb2 as pb
from scheduler.admission import check_request
from scheduler.errors import InvalidRequest, LockstepError, Overloaded
from scheduler.messages import Finish, FinishReason, Usage

SERVICE = pb.DESCRIPTOR.services_by_name["Lockstep"].full_name

_USAGE_WAIT_S = 1.0
"""How long a stop string's answer waits for the pool's figures."""
_WATCH_S = 1.0
"""How often a health watch looks."""


class CallContext(Protocol):
    """The part of a gRPC call's context that is used here."""

    def set_code(self, code: StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...


class Refused(Exception):
    """Ends a call with a status."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(slots=True)
class _Call:
    """One accepted request on its way."""

    ask: Ask
    live: LiveRequest
    text: TextStream
    arrived_s: float
    taken: int
    """Tokens of `live` that the text has seen."""
    stop: str | None = None
    dropped: int = 0
    """Tokens seen that lie behind a stop string."""


class Ingress:
    """All calls of one process. Call `start` on an event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        pool: PoolPort,
        text: TargetText,
        name: str,
        meter: IngressMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._pool = pool
        self._text = text
        self._link = PoolLink(pool, name, config.pool.poll_s, clock=clock)
        self._meter = meter or IngressMeter()
        self._clock = clock
        self._closing = asyncio.Event()

    def start(self) -> None:
        self._link.start()

    def check(self) -> None:
        """Raises RuntimeError when the loops between ingress and pool have died."""
        self._link.check()

    async def close(self) -> None:
        self._closing.set()
        await self._link.close()

    # ------------------------------------------------------------------ lockstep.v1

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: CallContext
    ) -> pb.GenerateResponse:
        """Unary: the whole answer."""
        try:
            return await self.answer(request)
        except Refused as refused:
            _set_status(grpc_context, refused.refusal)
            return pb.GenerateResponse()

    async def GenerateStream(
        self, request: pb.GenerateRequest, grpc_context: CallContext
    ) -> AsyncIterator[pb.GenerateChunk]:
        """Server streaming: chunks, the last one with the end."""
        arrived_s = self._clock()
        try:
            call = await self._open(request, arrived_s)
        except Refused as refused:
            _set_status(grpc_context, refused.refusal)
            yield pb.GenerateChunk()
            return
        with self._cancelled_with_the_client(call):
            chunk = pb.GenerateChunk(request_id=call.ask.client_id, seed=call.ask.seed)
            async for text, tokens in self._pieces(call):
                chunk.text = text
                chunk.token_ids.extend(tokens)
                self._meter.chunk()
                yield chunk
                chunk = pb.GenerateChunk()
            try:
                text, finish = await self._end(call)
            except Refused as refused:
                _set_status(grpc_context, refused.refusal)
                yield chunk
                return
            chunk.text = text
            chunk.end.CopyFrom(self._to_end(call, finish))
            refusal = None if call.stop else refusal_of_finish(finish)
            if refusal is not None:
                _set_status(grpc_context, refusal)
            self._meter.chunk()
            yield chunk

    async def Status(
        self, request: pb.StatusRequest, grpc_context: CallContext
    ) -> pb.StatusResponse:
        try:
            return to_status(await self._pool.status())
        except PoolUnreachable as error:
            _set_status(grpc_context, refusal_of_error(error))
            return pb.StatusResponse()

    # ------------------------------------------------------------------ grpc.health.v1

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: CallContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", SERVICE):
            _set_status(grpc_context, Refusal(StatusCode.NOT_FOUND, "service: unknown"))
            return health_pb2.HealthCheckResponse()
        return await self._health()

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: CallContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        known = request.service in ("", SERVICE)
        last: health_pb2.HealthCheckResponse | None = None
        while not self._closing.is_set():
            now = (
                await self._health()
                if known
                else health_pb2.HealthCheckResponse(
                    status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                )
            )
            if last is None or now.status != last.status:
                last = now
                yield now
            await asyncio.sleep(_WATCH_S)

    async def List(
        self, request: health_pb2.HealthListRequest, grpc_context: CallContext
    ) -> health_pb2.HealthListResponse:
        health = await self._health()
        return health_pb2.HealthListResponse(statuses={"": health, SERVICE: health})

    async def _health(self) -> health_pb2.HealthCheckResponse:
        states = health_pb2.HealthCheckResponse
        ready = await self.ready()
        return states(status=states.SERVING if ready else states.NOT_SERVING)

    async def ready(self) -> bool:
        """Whether a replica has its models in memory."""
        try:
            view = await self._pool.status()
        except PoolUnreachable:
            return False
        return any(not replica.draining for replica in view.status.replicas)

    # ------------------------------------------------------------------ one request

    async def answer(self, message: pb.GenerateRequest) -> pb.GenerateResponse:
        """The whole answer to a request. Raises Refused."""
        call = await self._open(message, self._clock())
        with self._cancelled_with_the_client(call):
            texts: list[str] = []
            token_ids: list[int] = []
            if call.ask.stop:
                async for text, tokens in self._pieces(call):
                    texts.append(text)
                    token_ids.extend(tokens)
            else:
                await call.live.ended.wait()
                text, token_ids = self._take(call)
                texts.append(text)
            text, finish = await self._end(call)
            texts.append(text)
            refusal = None if call.stop else refusal_of_finish(finish)
            if refusal is not None:
                raise Refused(refusal)
            return pb.GenerateResponse(
                request_id=call.ask.client_id,
                text="".join(texts),
                token_ids=token_ids,
                end=self._to_end(call, finish),
            )

    async def _open(self, message: pb.GenerateRequest, arrived_s: float) -> _Call:
        try:
            check_message(message, self._config.ingress)
            if self._link.unfinished >= self._config.ingress.requests_max:
                raise Overloaded(f"{self._link.unfinished} requests are in flight already")
            ask = to_ask(message, await self._prompt(message), self._text, self._config.ingress)
            # All of it before any token is decoded: decoding stands on the event loop.
            check_request(ask.request, self._config.scheduler, self._text.spec)
        except InvalidRequest as error:
            raise Refused(refusal_of_error(rename_field(error, message))) from None
        except LockstepError as error:
            raise Refused(refusal_of_error(error)) from None
        text = TextStream(self._text.tokenizer, ask.request.prompt, ask.stop)
        committed = ask.request.committed
        seen = text.push(committed)
        live = self._link.submit(ask.request, ask.timeout_s)
        call = _Call(ask, live, text, arrived_s, taken=len(committed), stop=seen.stop)
        if seen.stop is not None:
            self._link.cancel(live)
        return call

    async def _prompt(self, message: pb.GenerateRequest) -> tuple[int, ...]:
        if message.WhichOneof("input") == "prompt_token_ids":
            return tuple(message.prompt_token_ids.ids)
        if len(message.prompt) <= self._config.ingress.tokenize_inline_bytes:
            return self._text.encode(message.prompt)
        return await asyncio.to_thread(self._text.encode, message.prompt)

    async def _pieces(self, call: _Call) -> AsyncIterator[tuple[str, list[int]]]:
        """Text and tokens as they come, with pauses between them, until the end is known.

        The first piece comes at once, and what came with the end is left to `_end`.
        """
        live = call.live
        while call.stop is None and not live.ended.is_set():
            await live.changed.wait()
            live.changed.clear()
            text, tokens = self._take(call)
            if not tokens:
                continue
            yield text, tokens
            if call.stop is None and not live.ended.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(live.ended.wait(), self._pause_s())
        if call.stop is None:
            text, tokens = self._take(call)
            if tokens:
                yield text, tokens

    def _pause_s(self) -> float:
        """Between two chunks of one stream; grows with the streams that share the CPU."""
        config = self._config.ingress
        return max(config.coalesce_ms / 1000, self._link.unfinished / config.chunks_per_s)

    def _take(self, call: _Call) -> tuple[str, list[int]]:
        """Push the tokens that came since; a stop string ends the request at the pool."""
        tokens = call.live.tokens[call.taken :]
        piece = call.text.push(tokens)
        call.taken += piece.tokens
        if piece.stop is not None:
            call.stop = piece.stop
            self._link.cancel(call.live)
        return piece.text, tokens[: piece.tokens]

    async def _end(self, call: _Call) -> tuple[str, Finish]:
        """The rest of the text, and how it ended. Raises Refused for what the pool refused."""
        live = call.live
        if call.stop is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(live.ended.wait(), _USAGE_WAIT_S)
            return "", live.finish or Finish(live.pool_id, FinishReason.STOP, Usage())
        await live.ended.wait()
        if live.unreachable:
            raise Refused(Refusal(StatusCode.UNAVAILABLE, "the pool does not answer"))
        if live.reject is not None:
            raise Refused(refusal_of_reject(live.reject, call.ask))
        assert live.finish is not None
        rest = call.text.finish()
        call.stop = rest.stop
        return rest.text, live.finish

    def _to_end(self, call: _Call, finish: Finish) -> pb.End:
        first_s = call.live.first_s or self._clock()
        return to_end(
            finish,
            call.ask,
            call.stop,
            tokens=call.taken,
            first_token_s=first_s - call.arrived_s,
            total_s=self._clock() - call.arrived_s,
        )

    @contextmanager
    def _cancelled_with_the_client(self, call: _Call):  # type: ignore[no-untyped-def]
        """Whatever ends the call early, a cancel or a lost connection, ends the request too."""
        try:
            yield
        finally:
            live = call.live
            if not live.ended.is_set():
                self._link.cancel(live)
            status = "CANCELLED" if live.finish is None else live.finish.reason.name
            first_s = live.first_s - call.arrived_s if live.first_s else 0.0
            self._meter.answered(status, first_s, self._clock() - call.arrived_s)


def _set_status(context: CallContext, refusal: Refusal) -> None:
    context.set_code(refusal.code)
    context.set_details(refusal.message)
