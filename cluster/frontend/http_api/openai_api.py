"""OpenAI's API: models, completions and chat completions, whole or as server-sent events.

Only translates, like the gRPC edge. What it does not support it refuses by name (openai_models).
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cluster.frontend.answer import Answer
from cluster.frontend.calls import GenerateCall, SequenceEnd
from cluster.frontend.http_api.body import BodyReader
from cluster.frontend.http_api.errors import (
    EVENTS,
    check_model,
    checked_caller,
    refusal_body,
    refusal_response,
)
from cluster.frontend.http_api.openai_answers import OpenAIAnswer, Place, Written
from cluster.frontend.http_api.openai_models import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    parse_request,
)
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import Refused
from scheduler.errors import InvalidRequest


def openai_router(service: FrontendService, bodies: BodyReader) -> APIRouter:
    router = APIRouter()
    served = {
        "id": service.config.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "lockstep",
    }

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        checked_caller(service, request)
        return JSONResponse({"object": "list", "data": [served]})

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        checked_caller(service, request)
        with service.refusals():
            check_model(service, name)
        return JSONResponse(served)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answered(request, CompletionRequest)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answered(request, ChatRequest)

    async def answered(request: Request, kind: type[AnyRequest]) -> Response:
        caller = checked_caller(service, request)
        with service.refusals():
            asked = await bodies.read(request, partial(parse_request, kind))
            check_model(service, asked.model)
            shape = OpenAIAnswer(asked, service.text)
            call = asked.to_call(caller, request.headers.get("x-request-id") or shape.id)
            call, place = _resumed(call, request.headers.get("last-event-id"))
        return _CallResponse(service, call, shape, place)

    return router


class _CallResponse(Response):
    """Opens the call, sends its answer and closes it, all while the client is there.

    A refusal that comes before the first event of a stream has its own status; a later one is an
    event, and the last.
    """

    def __init__(
        self, service: FrontendService, call: GenerateCall, shape: OpenAIAnswer, skip: Place
    ) -> None:
        """`skip`: what the client has of an earlier stream of the same call."""
        super().__init__()
        self._service = service
        self._call = call
        self._shape = shape
        self._skip = skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving = asyncio.create_task(self._serve(scope, receive, send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            serving.cancel()
            leaving.cancel()
            await asyncio.gather(serving, leaving, return_exceptions=True)

    def _event_id(self, answer: Answer, one: Written) -> str | None:
        """With it as Last-Event-ID a client goes on behind the event."""
        if self._call.sequences > 1:
            return None
        place = one.place
        seed = answer.seed(0) or 0
        return f"{self._call.request_id}:{seed}:{place.tokens}:{place.chars}:{place.calls}"

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        written: dict[int, Written] = {}
        ends: dict[int, SequenceEnd] = {}
        streaming = False
        try:
            async with self._service.open(self._call) as answer:
                async for delta in answer:
                    if delta.end is not None:
                        if delta.end.refusal is not None:
                            raise Refused(delta.end.refusal)
                        ends[delta.index] = delta.end
                    if first := delta.index not in written:
                        written[delta.index] = Written(answer.prompt(delta.index), skip=self._skip)
                    one = written[delta.index]
                    if not self._call.stream:
                        one.add(delta)
                        continue
                    if not streaming:
                        streaming = True
                        await _start(send)
                    for event in self._shape.events(delta, one, first):
                        await _event(send, json.dumps(event), self._event_id(answer, one))
        except Refused as refused:
            refusal = self._shape.asked.renamed(refused.refusal)
            if not streaming:
                await refusal_response(refusal)(scope, receive, send)
                return
            await _event(send, json.dumps(refusal_body(refusal)))
        else:
            if not streaming:
                await JSONResponse(self._shape.whole(written, ends))(scope, receive, send)
                return
            if self._shape.with_usage:
                await _event(send, json.dumps(self._shape.usage_event(ends)))
            await _event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _resumed(call: GenerateCall, last_event: str | None) -> tuple[GenerateCall, Place]:
    """The call as it was sent first, and how far its client is. A stream is a function of the call,
    so any frontend writes it once more, and leaves out what the client has. Raises InvalidRequest.
    """
    if last_event is None or not call.stream:
        return call, Place()
    if call.sequences > 1:
        raise InvalidRequest("last-event-id", "only a stream of one sequence can go on")
    try:
        request_id, seed, *numbers = last_event.rsplit(":", 4)
        tokens, chars, calls = map(int, numbers)
        call = replace(call, request_id=request_id, seed=int(seed) if call.sampled else call.seed)
    except ValueError:
        raise InvalidRequest("last-event-id", "is no id of an event of ours") from None
    return call, Place(tokens, chars, calls)


async def _start(send: Send) -> None:
    headers = [(b"content-type", EVENTS.encode()), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _event(send: Send, data: str, name: str | None = None) -> None:
    body = (f"id: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
