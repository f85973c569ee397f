"""OpenAI's API: models, completions and chat completions, whole or as server-sent events.

Only translates, like the gRPC edge. What it does not support it refuses by name (openai_models).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cluster.frontend.answer import Answer
from cluster.frontend.calls import GenerateCall, SequenceEnd
from cluster.frontend.http_api.body import BodyReader
from cluster.frontend.http_api.errors import (
    UNEXPECTED,
    check_model,
    checked_caller,
    refusal_body,
    refusal_response,
)
from cluster.frontend.http_api.event_id import EventId, Place
from cluster.frontend.http_api.openai_answers import OpenAIAnswer, Written
from cluster.frontend.http_api.openai_models import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    parse_request,
)
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import Refused

log = logging.getLogger("lockstep.frontend")


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
            call = asked.to_call(caller, request.headers.get("x-request-id", ""))
            last = None
            if (name := request.headers.get("last-event-id")) is not None:
                last = EventId.parse(name, call.sequences, call.stream)
                # With its seed the stream is the same again.
                call = replace(call, drawn_seed=last.seed)
            shape = OpenAIAnswer(asked, service.text, None if last is None else last.answer)
            call = replace(call, request_id=call.request_id or shape.id)
        return _CallResponse(service, call, shape, last)

    return router


class _CallResponse(Response):
    """Opens the call, sends its answer and closes it. Serve cancels it when its client leaves.

    A refusal that comes before the first event of a stream has its own status; a later one is an
    event, and the last.
    """

    def __init__(
        self,
        service: FrontendService,
        call: GenerateCall,
        shape: OpenAIAnswer,
        last: EventId | None,
    ) -> None:
        """`last`: of the events that the client has of an earlier stream of the same call. A stream
        is a function of its call, so any frontend writes it once more, and leaves out those.
        """
        super().__init__()
        self._service = service
        self._call = call
        self._shape = shape
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        written: list[Written] = []
        ends: dict[int, SequenceEnd] = {}
        seed = 0
        streaming = False

        async def event(said: Mapping[str, Any], told_usage: bool = False) -> None:
            places = [one.at for one in written]
            name = EventId(self._shape.id, seed, places, told_usage)
            await _event(send, json.dumps(said), f"id: {name}\n")

        try:
            async with self._service.open(self._call) as answer:
                written += self._nothing_yet(answer)
                seed = answer.seed(0) or 0
                async for delta in answer:
                    if delta.end is not None:
                        if delta.end.refusal is not None:
                            raise Refused(delta.end.refusal)
                        ends[delta.index] = delta.end
                    one = written[delta.index]
                    if not self._call.stream:
                        one.add(delta)
                        continue
                    if not streaming:
                        streaming = True
                        await _start(send)
                    for said in self._shape.events(delta, one):
                        await event(said)
            if not streaming:
                await JSONResponse(self._shape.whole(written, ends))(scope, receive, send)
                return
            told = self._last is not None and self._last.told_usage
            if self._shape.with_usage and not told:
                await event(self._shape.usage_event(ends), told_usage=True)
            await _event(send, "[DONE]")
        except Refused as refused:
            refusal = self._shape.asked.renamed(refused.refusal)
            if not streaming:
                await refusal_response(refusal)(scope, receive, send)
                return
            await event(refusal_body(refusal))
        except Exception:
            if not streaming:
                raise
            log.exception("%s failed", scope["path"])
            await event(refusal_body(UNEXPECTED))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _nothing_yet(self, answer: Answer) -> list[Written]:
        """Of each sequence."""
        count = self._call.sequences
        skips = [Place()] * count if self._last is None else self._last.places
        return [
            Written(
                answer.prompt(index),
                answer.prompt_logprobs(index),
                skips[index],
                answer.called(index),
                self._shape.echo(index, answer.prompt(index)),
            )
            for index in range(count)
        ]


async def _start(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _event(send: Send, data: str, id_line: str = "") -> None:
    body = f"{id_line}data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})
