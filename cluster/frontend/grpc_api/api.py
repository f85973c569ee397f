"""The RPCs, by their names. Translates messages to calls and deltas to messages; decides nothing.

Serve's proxy calls the methods and gives them the call's context. A call that fails sets its status
on the context and returns, so that a client's mistake is no stack trace in the server's log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import chain
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

from google.protobuf.message import Message
from grpc import StatusCode
from grpc_health.v1 import health_pb2

from cluster.frontend.admission.control import Caller
from cluster.frontend.calls import Delta, GenerateCall
from cluster.frontend.grpc_api.handlers import LOCKSTEP, Unparsed
from cluster.frontend.grpc_api.messages import to_call, to_parts, to_status
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import Refusal, Refused
from protos import lockstep_pb2 as pb
from scheduler.errors import InvalidRequest

_HEALTH = health_pb2.HealthCheckResponse
_NO_HEALTH_REQUEST = Refusal(
    StatusCode.INVALID_ARGUMENT, "request: no grpc.health.v1.HealthCheckRequest"
)
_TRANSLATE_INLINE = 1 << 14
"""Log-probabilities; they take some 10 ms."""
_M = TypeVar("_M")
_P = TypeVar("_P", bound=Message)


class CallContext(Protocol):
    """The part of a gRPC call's context that is used here."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...

    def peer(self) -> str: ...

    def set_code(self, code: StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None: ...


class GrpcApi:
    """lockstep.v1 and grpc.health.v1 of one frontend process."""

    def __init__(self, service: FrontendService, answer_bytes_max: int = (1 << 31) - 1) -> None:
        """`answer_bytes_max`: of one message, as far as the proxies pass it on."""
        self.service = service
        self.answer_bytes_max = answer_bytes_max

    async def close(self) -> None:
        await self.service.close()

    async def Generate(
        self, request: pb.GenerateRequest | Unparsed, grpc_context: CallContext
    ) -> pb.GenerateResponse:
        """Unary: the whole answer."""
        try:
            call = _parsed(self.service, request, caller_of(grpc_context), stream=False)
            async with self.service.open(call) as answer:
                # Not before: the number of choices has been checked now.
                choices = [pb.GenerateResponse()] * call.choices
                async for delta in answer:
                    assert delta.end is not None, "one delta with all of it"
                    if delta.end.refusal is not None:
                        raise Refused(delta.end.refusal)
                    parts = await _parts(delta)
                    choices[delta.index] = pb.GenerateResponse(request_id=call.request_id, **parts)
                first, *others = choices
                first.others.extend(others)
                return self._sendable(first)
        except Refused as refused:
            refuse(grpc_context, refused.refusal)
            return pb.GenerateResponse()

    async def GenerateStream(
        self, request: pb.GenerateRequest | Unparsed, grpc_context: CallContext
    ) -> AsyncIterator[pb.GenerateChunk]:
        """Server streaming: chunks, the last one of each choice with its end."""
        first: dict[str, Any] = {}
        try:
            call = _parsed(self.service, request, caller_of(grpc_context), stream=True)
            async with self.service.open(call) as answer:
                first = {"request_id": call.request_id, "seed": answer.seed(0)}
                async for delta in answer:
                    if delta.end is not None and delta.end.refusal is not None:
                        refuse(grpc_context, delta.end.refusal)
                    yield self._sendable(pb.GenerateChunk(**first, **await _parts(delta)))
                    first = {}
        except Refused as refused:
            refuse(grpc_context, refused.refusal)
            yield pb.GenerateChunk(**first)

    def _sendable(self, answer: _P) -> _P:
        """Raises Refused for more than one message may hold: gRPC's own words would have the
        client ask again."""
        size, most = answer.ByteSize(), self.answer_bytes_max
        if size > most:
            reason = (
                f"the answer has {size} bytes, one message {most} at most; ask for fewer"
                " log-probabilities or choices, or for a stream"
            )
            with self.service.refusals():
                raise InvalidRequest("request", reason)
        return answer

    async def Status(
        self, request: pb.StatusRequest | Unparsed, grpc_context: CallContext
    ) -> pb.StatusResponse:
        try:
            self.service.check_caller(caller_of(grpc_context))
            with self.service.refusals():
                _message(request, "StatusRequest")
            return to_status(await self.service.status())
        except Refused as refused:
            refuse(grpc_context, refused.refusal)
            return pb.StatusResponse()

    # ------------------------------------------------------------------ health

    # Open to everybody: it tells nothing of requests.

    async def Check(
        self, request: health_pb2.HealthCheckRequest | Unparsed, grpc_context: CallContext
    ) -> health_pb2.HealthCheckResponse:
        if isinstance(request, Unparsed):
            refuse(grpc_context, _NO_HEALTH_REQUEST)
        elif request.service not in ("", LOCKSTEP.full_name):
            refuse(grpc_context, Refusal(StatusCode.NOT_FOUND, "service: unknown"))
        else:
            ready = self.service.ready()
            return _HEALTH(status=_HEALTH.SERVING if ready else _HEALTH.NOT_SERVING)
        return _HEALTH()


async def _parts(delta: Delta) -> dict[str, Any]:
    """Many log-probabilities are translated off the event loop."""
    of_prompt = () if delta.end is None else delta.end.prompt_logprobs
    told = sum(said.told for said in chain(delta.logprobs, of_prompt))
    if told <= _TRANSLATE_INLINE:
        return to_parts(delta)
    return await asyncio.to_thread(to_parts, delta)


def caller_of(context: CallContext) -> Caller:
    return Caller.from_headers(context.invocation_metadata(), _address(context.peer()))


def _address(peer: str) -> str:
    """The IP address in `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`; else empty."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest).rpartition(":")[0].strip("[]")


def refuse(context: CallContext, refusal: Refusal) -> None:
    """Set the status that the call will end with."""
    context.set_code(refusal.code)
    context.set_details(refusal.short_message)
    if metadata := refusal.trailing_metadata:
        context.set_trailing_metadata(metadata)


def _parsed(
    service: FrontendService, request: pb.GenerateRequest | Unparsed, caller: Caller, stream: bool
) -> GenerateCall:
    """An unknown caller learns nothing of its request. Raises Refused."""
    service.check_caller(caller)
    with service.refusals():
        message = _message(request, "GenerateRequest")
        return to_call(message, caller, stream, service.config.frontend.message_bytes_max)


def _message(request: _M | Unparsed, name: str) -> _M:
    """Raises InvalidRequest for bytes that were no message."""
    if isinstance(request, Unparsed):
        raise InvalidRequest("request", f"{request.size} bytes that are no lockstep.v1.{name}")
    return request
