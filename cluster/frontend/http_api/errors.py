"""What all routes share: the caller and the model of a request, and errors in the shape of OpenAI's
API, unexpected exceptions among them."""

from __future__ import annotations

import json
import logging

from fastapi import Request
from fastapi.responses import JSONResponse
from grpc import StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.frontend.admission.control import Caller
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import MEANINGS, Refusal, Refused

log = logging.getLogger("lockstep.frontend")

EVENTS = "text/event-stream"
"""The content type of a stream."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def checked_caller(service: FrontendService, request: Request) -> Caller:
    """Raises Refused for a caller that is not served."""
    address = request.client.host if request.client else ""
    caller = Caller.from_headers(request.headers.items(), address)
    service.check_caller(caller)
    return caller


def check_model(service: FrontendService, name: str) -> None:
    """Raises Refused for another model than the one that is served."""
    served = service.config.model_name
    if name != served:
        message = f"model: {name!r} is not served here, {served!r} is"
        raise Refused(Refusal(StatusCode.NOT_FOUND, message, field="model"))


def refusal_body(refusal: Refusal) -> dict[str, object]:
    """`code` is gRPC's name of the status, `param` the field that is wrong or null."""
    status = MEANINGS[refusal.code].http
    return error_body(refusal.code.name, refusal.short_message, status, refusal.field)


def error_body(code: str, message: str, status: int, param: str = "") -> dict[str, object]:
    param = param.encode("utf-8", "replace").decode()
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code}}


def error_response(code: str, message: str, status: int) -> JSONResponse:
    return JSONResponse(error_body(code, message, status), status_code=status)


def refusal_response(refusal: Refusal) -> JSONResponse:
    headers = dict(refusal.headers)
    if refusal.code is StatusCode.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(
        refusal_body(refusal), status_code=MEANINGS[refusal.code].http, headers=headers
    )


class UnexpectedErrors:
    """ASGI middleware: logs an exception that no route has caught, and tells the client of it.

    Within a stream that is an event, and the last.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: Headers | None = None

        async def watched(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = Headers(raw=message["headers"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if begun is not None and begun.get("content-type") != EVENTS:
                raise
            log.exception("%s failed", scope["path"])
            failure = Refusal(StatusCode.INTERNAL, "an error in the server, which has logged it")
            if begun is None:
                await refusal_response(failure)(scope, receive, send)
                return
            event = f"data: {json.dumps(refusal_body(failure))}\n\n"
            await send({"type": "http.response.body", "body": event.encode()})
