"""OpenAI's API: completions and chat completions, whole or as server-sent events.

Only translates, like the gRPC edge. `bodies` says which parameters are taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.frontend.answer import Answer
from cluster.frontend.calls import Delta, GenerateCall
from cluster.frontend.http_api.bodies import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    IgnoredNames,
    Taken,
    taken,
)
from cluster.frontend.http_api.edge import (
    UNEXPECTED,
    check_model,
    checked_caller,
    read_body,
    refusal_body,
    refusal_response,
)
from cluster.frontend.http_api.event_ids import EventId
from cluster.frontend.http_api.long_json import header_lines, send_json, send_pieces
from cluster.frontend.http_api.openai_answers import OpenAIAnswer
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import Refusal, Refused

log = logging.getLogger("lockstep.frontend")


def openai_router(service: FrontendService, unknown: IgnoredNames) -> APIRouter:
    router, bytes_max = APIRouter(), service.config.frontend.message_bytes_max
    refuse_unknown = service.config.server.unknown_fields == "refuse"

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answered(request, CompletionRequest)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answered(request, ChatRequest)

    @router.post("/invocations")
    async def invocations(request: Request) -> Response:
        """As SageMaker calls models: the body says which of both it is."""
        return await answered(request, None)

    async def answered(request: Request, kind: type[GenerationRequest] | None) -> Response:
        caller = checked_caller(service, request)
        with service.refusals():
            check = partial(_taken, kind, refuse_unknown)
            asked, ignored = given = await read_body(request, bytes_max, check)
            unknown.note(ignored)
            model = check_model(service, asked.model)
            asked = asked.as_served(model, service.config.server)
            call = asked.to_call(caller, request.headers.get("x-request-id", ""))
            last = None
            if (name := request.headers.get("last-event-id")) is not None:
                last = EventId.parse(name, call.sequences, call.stream)
                # With its seed the stream is the same again.
                seen = [place.tokens for place in last.places]
                call = replace(call, drawn_seed=last.seed, seen_tokens=seen)
            shape = OpenAIAnswer(asked, service.text, last)
            call = replace(call, request_id=call.request_id or shape.id)
        return CallResponse(service, call, shape, given.headers)

    return router


def _taken(
    kind: type[GenerationRequest] | None, refuse_unknown: bool, fields: dict[str, Any]
) -> Taken:
    if kind is None:
        kind = ChatRequest if "messages" in fields else CompletionRequest
    return taken(kind, fields, refuse_unknown)


class AnswerShape(Protocol):
    """What an endpoint says of an answer."""

    @property
    def asked(self) -> GenerationRequest: ...

    def begin(self, answer: Answer) -> None: ...

    def whole(self, deltas: Iterable[Delta]) -> Iterable[str]:
        """Its text, in pieces; `deltas`: one of each sequence, with all of it."""

    def next_event(self, delta: Delta) -> Iterable[str] | None: ...

    def last_events(self) -> Iterator[Iterable[str]]: ...

    def event(self, said: dict[str, Any]) -> Iterable[str]:
        """Of a body, an error's too."""


class CallResponse(Response):
    """Opens the call, sends its answer and closes it. Serve cancels it when its client leaves.

    A refusal that comes before the first event of a stream has its own status; a later one is an
    event, and the last.
    """

    def __init__(
        self,
        service: FrontendService,
        call: GenerateCall,
        shape: AnswerShape,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._more = headers
        self._service = service
        self._call = call
        self._shape = shape

    def refusal_response(self, refusal: Refusal) -> Response:
        """Where nothing was sent yet."""
        return refusal_response(refusal, self._more)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shape, deltas, streaming = self._shape, list[Delta](), False
        turns = self._service.writing
        try:
            async with self._service.open(self._call) as answer:
                shape.begin(answer)
                async for delta in answer:
                    if delta.end is not None and delta.end.refusal is not None:
                        raise Refused(delta.end.refusal)
                    if not self._call.stream:
                        deltas.append(delta)
                        continue
                    if not streaming:
                        streaming = True
                        await _start(send, self._more)
                    if (event := shape.next_event(delta)) is not None:
                        await send_pieces(send, event, turns)
            if not streaming:
                await send_json(send, shape.whole(deltas), turns, self._more)
                return
            for event in shape.last_events():
                await send_pieces(send, event, turns)
        except Refused as refused:
            refusal = shape.asked.renamed(refused.refusal)
            if not streaming:
                await self.refusal_response(refusal)(scope, receive, send)
                return
            await send_pieces(send, shape.event(refusal_body(refusal)), turns)
        except Exception:
            if not streaming:
                raise
            log.exception("%s failed", scope["path"])
            await send_pieces(send, shape.event(refusal_body(UNEXPECTED)), turns)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _start(send: Send, more: Mapping[str, str]) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    headers += header_lines(more)
    await send({"type": "http.response.start", "status": 200, "headers": headers})
