"""Speaks to clients: checks, tokenizes, submits to the pool, streams text. Knows no Ray.

The methods with capital names are the RPCs; Serve's proxy calls them by name and gives them the
call's context. A call that fails sets its status on the context and returns, so that a client's
mistake is no stack trace in the server's log. Prompts and outputs are never logged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from grpc import StatusCode

from cluster.config import ClusterConfig
from cluster.frontend.admission.control import Admission, Caller, Door
from cluster.frontend.calls import CallContext, Refusal, Refused, caller_of, refuse
from cluster.frontend.health import HealthService
from cluster.frontend.in_flight import InFlightRequest
from cluster.frontend.metrics import IngressMeter
from cluster.frontend.servicer import Unparsed
from cluster.frontend.target_text import TargetText
from cluster.frontend.text import Piece, TextStream
from cluster.frontend.wire import (
    Ask,
    check_message,
    priority_of,
    refusal_of_error,
    refusal_of_finish,
    refusal_of_reject,
    rename_field,
    to_ask,
    to_end,
    to_status,
)
from cluster.pool.protocol import STOPPING, PoolPort
from cluster.pool.shard_router import ShardRouter
from protos import lockstep_pb2 as pb
from scheduler.errors import InvalidRequest, LockstepError, Overloaded
from scheduler.messages import Finish, FinishReason, Usage
from scheduler.validation import check_request

_USAGE_WAIT_S = 1.0
"""How long a stop string's answer waits for the pool's figures."""
_SLICE_TOKENS = 256
"""So many tokens are made text before others have a turn; a few milliseconds, whatever they are."""

_M = TypeVar("_M")


@dataclass(slots=True)
class _Call:
    """One accepted request on its way."""

    ask: Ask
    admission: Admission
    live: InFlightRequest
    text: TextStream
    arrived_s: float
    taken: int
    """Tokens of `live` that the text has seen."""
    stop: str | None = None
    status: StatusCode = StatusCode.CANCELLED
    """How it ended for the client: it has left, unless it was told something else."""


class Ingress(HealthService):
    """All calls of one process. Call `start` on an event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        pools: Sequence[PoolPort],
        text: TargetText,
        name: str,
        meter: IngressMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pools`: one per shard."""
        self._config = config
        self._text = text
        pool = config.pool
        self._link = ShardRouter(
            pools, config.pool_names, name, pool.poll_s, pool.move_s, pool.unreachable_s, clock
        )
        self._meter = meter or IngressMeter()
        self._clock = clock
        self._door = Door(config.auth, config.ingress, clock)
        super().__init__(self._link.status, self._link.stopping, config.ingress.watches_max)

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
        self, request: pb.GenerateRequest | Unparsed, grpc_context: CallContext
    ) -> pb.GenerateResponse:
        """Unary: the whole answer."""
        try:
            return await self.answer(request, caller_of(grpc_context))
        except Refused as refused:
            refuse(grpc_context, refused.refusal)
            return pb.GenerateResponse()

    async def GenerateStream(
        self, request: pb.GenerateRequest | Unparsed, grpc_context: CallContext
    ) -> AsyncIterator[pb.GenerateChunk]:
        """Server streaming: chunks, the last one with the end."""
        arrived_s = self._clock()
        try:
            call = await self._open(request, caller_of(grpc_context), arrived_s)
        except Refused as refused:
            refuse(grpc_context, refused.refusal)
            yield pb.GenerateChunk()
            return
        with self._cancelled_with_the_client(call):
            chunk = pb.GenerateChunk(request_id=call.ask.client_id, seed=call.ask.seed)
            async for text, tokens in self._pieces(call):
                chunk.text += text
                chunk.token_ids.extend(tokens)
                if call.live.ended.is_set():
                    # It goes with the end: a chunk costs both processes on its way.
                    continue
                self._meter.chunk()
                yield chunk
                chunk = pb.GenerateChunk()
            try:
                text, finish, refusal = await self._end(call)
            except Refused as refused:
                refuse(grpc_context, refused.refusal)
                yield chunk
                return
            chunk.text += text
            chunk.end.CopyFrom(self._to_end(call, finish))
            if refusal is not None:
                refuse(grpc_context, refusal)
            self._meter.chunk()
            yield chunk

    async def Status(
        self, request: pb.StatusRequest | Unparsed, grpc_context: CallContext
    ) -> pb.StatusResponse:
        try:
            with self._refusals():
                self._door.check(caller_of(grpc_context))
                _parsed(request, "StatusRequest")
                return to_status(await self._link.status())
        except Refused as refused:
            refuse(grpc_context, refused.refusal)
            return pb.StatusResponse()

    # ------------------------------------------------------------------ one request

    @property
    def message_bytes_max(self) -> int:
        return self._config.ingress.message_bytes_max

    def check_caller(self, caller: Caller) -> None:
        """For whoever must know before there is a request. Raises Refused."""
        with self._refusals():
            self._door.check(caller)

    async def answer(
        self, request: pb.GenerateRequest | Unparsed, caller: Caller
    ) -> pb.GenerateResponse:
        """The whole answer to a request. Raises Refused."""
        call = await self._open(request, caller, self._clock())
        with self._cancelled_with_the_client(call):
            texts: list[str] = []
            token_ids: list[int] = []
            if call.ask.stop:
                async for text, tokens in self._pieces(call):
                    texts.append(text)
                    token_ids.extend(tokens)
            else:
                await call.live.ended.wait()
                text, token_ids = await self._take(call)
                texts.append(text)
            text, finish, refusal = await self._end(call)
            texts.append(text)
            if refusal is not None:
                raise Refused(refusal)
            return pb.GenerateResponse(
                request_id=call.ask.client_id,
                text="".join(texts),
                token_ids=token_ids,
                end=self._to_end(call, finish),
            )

    async def _open(
        self, request: pb.GenerateRequest | Unparsed, caller: Caller, arrived_s: float
    ) -> _Call:
        """Let a request in and hand it to the pool. Raises Refused."""
        with self._refusals(request):
            admission = self._door.admit(caller)
            try:
                return await self._submit(_parsed(request, "GenerateRequest"), admission, arrived_s)
            except BaseException:
                admission.close()
                raise

    async def _submit(
        self, message: pb.GenerateRequest, admission: Admission, arrived_s: float
    ) -> _Call:
        if self._link.stopping.is_set():
            raise Refused(Refusal(StatusCode.UNAVAILABLE, STOPPING))
        check_message(message, self._config, self._text.context_len)
        priority = admission.priority(priority_of(message))
        if self._link.unfinished >= self._config.ingress.requests_max:
            raise Overloaded(f"{self._link.unfinished} requests are in flight already")
        prompt = await self._prompt(message)
        limits, tenant = self._config.ingress, admission.tenant
        ask = to_ask(message, prompt, self._text, limits, tenant, priority)
        # All of it before any token is decoded: decoding stands on the event loop.
        check_request(ask.request, self._config.scheduler, self._text.spec)
        admission.charge(ask.request.length_max)
        text = TextStream(self._text.tokenizer, ask.request.prompt, ask.stop)
        committed = ask.request.committed
        seen = await _pushed(text, committed)
        live = self._link.submit(ask.request, ask.timeout_s)
        call = _Call(ask, admission, live, text, arrived_s, taken=len(committed), stop=seen.stop)
        if seen.stop is not None:
            self._link.cancel(live)
        return call

    @contextmanager
    def _refusals(self, request: object = None) -> Iterator[None]:
        """Errors become refusals in the words of the client's request, and are counted."""
        try:
            yield
        except Refused as refused:
            self._meter.refused(refused.refusal.code)
            raise
        except LockstepError as error:
            if isinstance(error, InvalidRequest) and isinstance(request, pb.GenerateRequest):
                error = rename_field(error, request)
            refusal = refusal_of_error(error)
            self._meter.refused(refusal.code)
            raise Refused(refusal) from None

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
            text, tokens = await self._take(call)
            if not tokens:
                continue
            yield text, tokens
            if call.stop is None and not live.ended.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s()):
                        await live.ended.wait()
        if call.stop is None:
            text, tokens = await self._take(call)
            if tokens:
                yield text, tokens

    def _pause_s(self) -> float:
        """Between two chunks of one stream; grows with the streams that share the CPU."""
        config = self._config.ingress
        return max(config.coalesce_ms / 1000, self._link.unfinished / config.chunks_per_s)

    async def _take(self, call: _Call) -> tuple[str, list[int]]:
        """Push the tokens that came since; a stop string ends the request at the pool."""
        tokens = call.live.tokens[call.taken :]
        piece = await _pushed(call.text, tokens)
        call.taken += piece.tokens
        if piece.stop is not None:
            call.stop = piece.stop
            self._link.cancel(call.live)
        return piece.text, tokens[: piece.tokens]

    async def _end(self, call: _Call) -> tuple[str, Finish, Refusal | None]:
        """The rest of the text, how it ended, and the status if that is not OK.

        Raises Refused for what the pool refused.
        """
        live = call.live
        if call.stop is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_USAGE_WAIT_S):
                    await live.ended.wait()
            call.status = StatusCode.OK
            return "", live.finish or Finish(live.pool_id, FinishReason.STOP, Usage()), None
        await live.ended.wait()
        if live.unreachable:
            stopping = self._link.stopping.is_set()
            message = STOPPING if stopping else "the pool does not answer"
            call.status = StatusCode.UNAVAILABLE
            raise Refused(Refusal(call.status, message))
        if live.reject is not None:
            refusal = refusal_of_reject(live.reject, call.ask)
            call.status = refusal.code
            self._meter.refused(refusal.code)
            raise Refused(refusal)
        assert live.finish is not None
        unfinished = refusal_of_finish(live.finish, call.ask.client_id)
        if unfinished is not None:
            # What is held back stays so: who goes on from these tokens gets it then, and whole.
            call.status = unfinished.code
            return "", live.finish, unfinished
        rest = call.text.finish()
        call.stop = rest.stop
        call.status = StatusCode.OK
        return rest.text, live.finish, None

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
    def _cancelled_with_the_client(self, call: _Call) -> Iterator[None]:
        """Whatever ends the call early, a cancel or a lost connection, ends the request too."""
        try:
            yield
        finally:
            live = call.live
            if not live.ended.is_set():
                self._link.cancel(live)
            refused = live.reject is not None
            used = 0 if refused else len(live.request.prompt) + len(live.tokens)
            call.admission.close(used)
            first_s = live.first_s - call.arrived_s if live.first_s else 0.0
            self._meter.answered(call.status.name, first_s, self._clock() - call.arrived_s)


def _parsed(request: _M | Unparsed, name: str) -> _M:
    """Raises InvalidRequest for bytes that were no message."""
    if isinstance(request, Unparsed):
        raise InvalidRequest("request", f"{request.size} bytes that are no lockstep.v1.{name}")
    return request


async def _pushed(text: TextStream, tokens: Sequence[int]) -> Piece:
    """Push tokens in slices, between which the event loop has others' turns."""
    piece = text.push(tokens[:_SLICE_TOKENS])
    if len(tokens) <= _SLICE_TOKENS or piece.stop is not None:
        return piece
    texts, used = [piece.text], piece.tokens
    while used < len(tokens) and piece.stop is None:
        await asyncio.sleep(0)
        piece = text.push(tokens[used : used + _SLICE_TOKENS])
        texts.append(piece.text)
        used += piece.tokens
    return Piece("".join(texts), used, piece.stop)
