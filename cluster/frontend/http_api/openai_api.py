"""OpenAI's API: models, completions and chat completions, whole or as server-sent events.

Only translates, like the gRPC edge. What it does not support it refuses by name (openai_models).
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from grpc import StatusCode
from starlette.types import Receive, Scope, Send

from cluster.frontend.calls import Delta, GenerateCall, SequenceEnd
from cluster.frontend.http_api.body import BodyReader
from cluster.frontend.http_api.errors import caller_of, refusal_body, refusal_response
from cluster.frontend.http_api.openai_models import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    parse_request,
)
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import Refusal, Refused
from scheduler.messages import FinishReason

_FINISH_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


def openai_router(service: FrontendService, bodies: BodyReader) -> APIRouter:
    router = APIRouter()
    model_name = service.config.replica.target
    started = int(time.time())

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        try:
            service.check_caller(caller_of(request))
        except Refused as refused:
            return refusal_response(refused.refusal)
        model = {"id": model_name, "object": "model", "created": started, "owned_by": "lockstep"}
        return JSONResponse({"object": "list", "data": [model]})

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answered(request, CompletionRequest)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answered(request, ChatRequest)

    async def answered(request: Request, kind: type[AnyRequest]) -> Response:
        try:
            caller = caller_of(request)
            service.check_caller(caller)
            with service.refusals():
                asked = await bodies.read(request, partial(parse_request, kind))
                if asked.model != model_name:
                    message = f"model: {asked.model!r} is not served here, {model_name!r} is"
                    raise Refused(Refusal(StatusCode.NOT_FOUND, message, field="model"))
        except Refused as refused:
            return refusal_response(refused.refusal)
        shape = _Shape(asked)
        call = asked.to_call(caller, request.headers.get("x-request-id") or shape.id)
        return _CallResponse(service, call, shape)

    return router


class _Shape:
    """What the answers to one request look like."""

    def __init__(self, asked: AnyRequest) -> None:
        self.asked = asked
        self.chat = isinstance(asked, ChatRequest)
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())
        options = asked.stream_options
        self.with_usage = options is not None and options.include_usage

    def whole(self, texts: Mapping[int, str], ends: Mapping[int, SequenceEnd]) -> dict[str, Any]:
        choices = []
        for index in sorted(ends):
            text = texts[index]
            said = {"message": {"role": "assistant", "content": text}}
            choices.append(self._choice(index, said if self.chat else {"text": text}, ends[index]))
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, choices) | {"usage": self.usage(ends)}

    def events(self, delta: Delta, first: bool) -> Iterator[dict[str, Any]]:
        """Of one sequence; `first`: its first ones."""
        if self.chat and first:
            yield self._chunk(delta.index, {"delta": {"role": "assistant", "content": ""}}, None)
        if delta.text or delta.end is not None:
            text: dict[str, Any] = {"content": delta.text} if delta.text else {}
            said = {"delta": text} if self.chat else {"text": delta.text}
            yield self._chunk(delta.index, said, delta.end)

    def usage_event(self, ends: Mapping[int, SequenceEnd]) -> dict[str, Any]:
        return self._object(self._chunk_kind, []) | {"usage": self.usage(ends)}

    def usage(self, ends: Mapping[int, SequenceEnd]) -> dict[str, Any]:
        """A prompt counts once, however many choices it has."""
        new = sum(end.completion_tokens for end in ends.values())
        prompts = [end for index, end in ends.items() if index % self.asked.n == 0]
        given = sum(end.prompt_tokens for end in prompts)
        drafted = sum(end.usage.draft_tokens for end in ends.values())
        accepted = sum(end.usage.accepted_tokens for end in ends.values())
        return {
            "prompt_tokens": given,
            "completion_tokens": new,
            "total_tokens": given + new,
            "prompt_tokens_details": {
                "cached_tokens": sum(end.usage.cached_tokens for end in prompts)
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, index: int, said: dict[str, Any], end: SequenceEnd | None) -> dict[str, Any]:
        chunk = self._object(self._chunk_kind, [self._choice(index, said, end)])
        return chunk | ({"usage": None} if self.with_usage else {})

    def _choice(self, index: int, said: dict[str, Any], end: SequenceEnd | None) -> dict[str, Any]:
        reason = None if end is None else _FINISH_REASONS.get(end.reason)
        return {"index": index, **said, "logprobs": None, "finish_reason": reason}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.asked.model,
            "choices": choices,
        }


class _CallResponse(Response):
    """Opens the call, sends its answer and closes it, all while the client is there.

    A refusal that comes before the first event of a stream has its own status; a later one is an
    event, and the last.
    """

    def __init__(self, service: FrontendService, call: GenerateCall, shape: _Shape) -> None:
        super().__init__()
        self._service = service
        self._call = call
        self._shape = shape

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

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"x-request-id": self._call.request_id}
        texts: dict[int, str] = defaultdict(str)
        ends: dict[int, SequenceEnd] = {}
        streaming = False
        try:
            async with self._service.open(self._call) as answer:
                async for delta in answer:
                    if delta.end is not None:
                        if delta.end.refusal is not None:
                            raise Refused(delta.end.refusal)
                        ends[delta.index] = delta.end
                    if not self._call.stream:
                        texts[delta.index] = delta.text
                        continue
                    if not streaming:
                        streaming = True
                        await _start(send, headers)
                    first = delta.index not in texts
                    texts[delta.index] = ""
                    for event in self._shape.events(delta, first):
                        await _event(send, json.dumps(event))
        except Refused as refused:
            refusal = self._shape.asked.renamed(refused.refusal)
            if not streaming:
                response = refusal_response(refusal)
                response.headers.update(headers)
                await response(scope, receive, send)
                return
            await _event(send, json.dumps(refusal_body(refusal)))
        else:
            if not streaming:
                body = self._shape.whole(texts, ends)
                await JSONResponse(body, headers=headers)(scope, receive, send)
                return
            if self._shape.with_usage:
                await _event(send, json.dumps(self._shape.usage_event(ends)))
            await _event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _start(send: Send, headers: Mapping[str, str]) -> None:
    named = {"content-type": "text/event-stream", "cache-control": "no-cache", **headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _event(send: Send, data: str) -> None:
    body = f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
