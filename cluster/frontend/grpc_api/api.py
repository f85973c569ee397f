"""The RPCs, by their names. Translates messages to calls and deltas to messages; decides nothing.

Serve's proxy calls the methods and gives them the call's context. A call that fails sets its status
on the context and returns, so that a client's mistake is no stack trace in the server's log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from cluster.frontend.admission.control import Caller
from cluster.frontend.calls import GenerateCall
from cluster.frontend.grpc_api.context import CallContext, caller_of, refuse
from cluster.frontend.grpc_api.handlers import Unparsed
from cluster.frontend.grpc_api.health import HealthService
from cluster.frontend.grpc_api.messages import to_call, to_calls, to_end, to_logprobs
from cluster.frontend.grpc_api.status import to_status
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import Refused
from protos import lockstep_pb2 as pb
from scheduler.errors import InvalidRequest

_M = TypeVar("_M")


class GrpcApi(HealthService):
    """lockstep.v1 and grpc.health.v1 of one frontend process."""

    def __init__(self, service: FrontendService) -> None:
        self.service = service
        super().__init__(service.ready, service.stopping)

    async def close(self) -> None:
        self.end_watches()
        await self.service.close()

    async def Generate(
        self, request: pb.GenerateRequest | Unparsed, grpc_context: CallContext
    ) -> pb.GenerateResponse:
        """Unary: the whole answer."""
        try:
            call = _parsed(self.service, request, caller_of(grpc_context), stream=False)
            async with self.service.open(call) as answer:
                # Not before: the number of choices has been checked now.
                choices = [
                    pb.GenerateResponse(request_id=call.request_id, index=index)
                    for index in range(call.choices)
                ]
                async for delta in answer:
                    assert delta.end is not None, "one delta with all of it"
                    if delta.end.refusal is not None:
                        raise Refused(delta.end.refusal)
                    response = choices[delta.index]
                    response.text = delta.text
                    response.logprobs.extend(to_logprobs(delta.logprobs))
                    response.tool_calls.extend(to_calls(delta.calls))
                    response.token_ids.extend(delta.tokens)
                    response.end.CopyFrom(to_end(delta.end))
        except Refused as refused:
            refuse(grpc_context, refused.refusal)
            return pb.GenerateResponse()
        first, *others = choices
        first.others.extend(others)
        return first

    async def GenerateStream(
        self, request: pb.GenerateRequest | Unparsed, grpc_context: CallContext
    ) -> AsyncIterator[pb.GenerateChunk]:
        """Server streaming: chunks, the last one of each choice with its end."""
        chunk = pb.GenerateChunk()
        try:
            call = _parsed(self.service, request, caller_of(grpc_context), stream=True)
            async with self.service.open(call) as answer:
                chunk = pb.GenerateChunk(request_id=call.request_id, seed=answer.seed(0))
                async for delta in answer:
                    chunk.index = delta.index
                    chunk.text = delta.text
                    chunk.token_ids.extend(delta.tokens)
                    chunk.logprobs.extend(to_logprobs(delta.logprobs))
                    chunk.tool_calls.extend(to_calls(delta.calls))
                    if delta.end is not None:
                        chunk.end.CopyFrom(to_end(delta.end))
                        if delta.end.refusal is not None:
                            refuse(grpc_context, delta.end.refusal)
                    yield chunk
                    chunk = pb.GenerateChunk()
        except Refused as refused:
            refuse(grpc_context, refused.refusal)
            yield chunk

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
