"""The routes of Messages: create, and count tokens; errors as Anthropic's API says them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from cluster.frontend.calls import check_prompt
from cluster.frontend.http_api.bodies import IgnoredNames, taken
from cluster.frontend.http_api.bodies.messages import CountTokens, MessagesRequest
from cluster.frontend.http_api.edge import check_model, checked_caller, read_body, refusal_response
from cluster.frontend.http_api.messages.answer import MessagesAnswer
from cluster.frontend.http_api.openai_api import CallResponse
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import MEANINGS, Refusal, Refused

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_router(service: FrontendService, unknown: IgnoredNames) -> APIRouter:
    router, bytes_max = APIRouter(), service.config.frontend.message_bytes_max
    refuse_unknown = service.config.server.unknown_fields == "refuse"

    async def read(
        request: Request, kind: type[MessagesRequest]
    ) -> tuple[MessagesRequest, dict[str, str]]:
        check = partial(taken, kind, refuse_unknown=refuse_unknown)
        given = await read_body(request, bytes_max, check)
        unknown.note(given.ignored)
        model = check_model(service, given.body.model)
        return given.body.as_served(model, service.config.server), given.headers

    @router.post("/v1/messages")
    async def create(request: Request) -> Response:
        try:
            caller = checked_caller(service, request)
            with service.refusals():
                asked, headers = await read(request, MessagesRequest)
                call = asked.to_call(caller, request.headers.get("x-request-id", ""))
                shape = MessagesAnswer(asked, service.config.replica.block_size)
                call = replace(call, request_id=call.request_id or shape.id)
        except Refused as refused:
            return _refusal_response(refused.refusal, {})
        return _MessagesResponse(service, call, shape, headers)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        try:
            caller = checked_caller(service, request)
            with service.refusals():
                asked, headers = await read(request, CountTokens)
                if (use := asked.tool_use) is not None:
                    service.formats.tools(use)
                [prompt] = asked.prompts
                check_prompt(prompt, service.config)
            async with service.tokenizing(caller) as turn:
                encode, _ = await service.encoding(prompt, turn.admitted.tenant)
                tokens = len(await turn.run(encode))
                turn.admitted.spend(tokens)
        except Refused as refused:
            return _refusal_response(refused.refusal, {})
        return JSONResponse({"input_tokens": tokens}, headers=headers)

    return router


class _MessagesResponse(CallResponse):
    def refusal_response(self, refusal: Refusal) -> Response:
        return _refusal_response(refusal, self._more)


def _refusal_response(refusal: Refusal, more: Mapping[str, str]) -> Response:
    """With the status and the headers of any other."""
    status = MEANINGS[refusal.code].http
    error = {"type": _TYPES.get(status, "api_error"), "message": refusal.short_message}
    headers = refusal_response(refusal, more).headers
    kept = {name: headers[name] for name in headers if not name.startswith("content-")}
    return JSONResponse({"type": "error", "error": error}, status, kept)
