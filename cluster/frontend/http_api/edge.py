"""What the routes share: the caller, model and body of a request, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from grpc import StatusCode
from starlette.requests import ClientDisconnect

from cluster.frontend.admission.control import Caller
from cluster.frontend.http_api.error_body import error_body
from cluster.frontend.json_codec import parsed_json
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import MEANINGS, Refusal, Refused
from scheduler.errors import InvalidRequest

_BODY_S = 30.0
"""How long a body may take to come in."""
_PARSE_INLINE_BYTES = 16_384
"""A longer body is parsed on a thread: 100,000 token ids take about 0.15 s."""
_PARSER = ThreadPoolExecutor(1, "parser")
"""Long bodies take turns: parsing holds the GIL, so more threads would hold up the event loop."""
UNEXPECTED = Refusal(StatusCode.INTERNAL, "an error in the server, which has logged it")

T = TypeVar("T")


def checked_caller(service: FrontendService, request: Request) -> Caller:
    """Raises Refused for a caller that is not served."""
    caller = caller_of(request)
    service.check_caller(caller)
    return caller


def caller_of(request: Request) -> Caller:
    address = request.client.host if request.client else ""
    return Caller.from_headers(request.headers.items(), address)


def check_model(service: FrontendService, name: str | None) -> str:
    """The served model's name. Raises Refused for another one."""
    served = service.config.model_name
    if name is not None and name != served:
        message = f"model: {name!r} is not served here, {served!r} is"
        raise Refused(
            Refusal(StatusCode.NOT_FOUND, message, field="model", reason="model_not_found")
        )
    return served


async def read_body(request: Request, bytes_max: int, parse: Callable[[dict[str, Any]], T]) -> T:
    """What `parse` makes of the body's fields; it may raise InvalidRequest, too.

    Raises InvalidRequest for a body that is too slow or no JSON object, and Refused for one that is
    too long, or where the client leaves before its end.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > bytes_max:
                    message = f"request: the body has more than {bytes_max} bytes"
                    raise Refused(Refusal(StatusCode.OUT_OF_RANGE, message, field="request"))
    except TimeoutError:
        reason = f"the body did not come within {_BODY_S:.0f} s"
        raise InvalidRequest("request", reason) from None
    except ClientDisconnect:
        raise Refused(Refusal(StatusCode.CANCELLED, "the client has left")) from None
    if len(body) <= _PARSE_INLINE_BYTES:
        return _parsed(body, parse)
    return await asyncio.get_running_loop().run_in_executor(_PARSER, _parsed, body, parse)


def _parsed(body: bytearray, parse: Callable[[dict[str, Any]], T]) -> T:
    try:
        fields = parsed_json(body.removeprefix(BOM_UTF8))
    except ValueError as error:
        raise InvalidRequest("request", f"no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("request", "the body must be a JSON object")
    return parse(fields)


# --------------------------------------------------------------------------- errors


def refusal_body(refusal: Refusal) -> dict[str, object]:
    status = MEANINGS[refusal.code].http
    said = refusal.short_message
    return error_body(refusal.code.name, said, status, refusal.field, refusal.reason)


def refusal_response(refusal: Refusal, more: Mapping[str, str] | None = None) -> JSONResponse:
    """`more`: headers that the answer has, too."""
    headers = {**(more or {}), **dict(refusal.headers)}
    if refusal.code is StatusCode.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(
        refusal_body(refusal), status_code=MEANINGS[refusal.code].http, headers=headers
    )
