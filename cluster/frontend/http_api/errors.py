"""What all routes share: the caller and the model of a request, and errors in the shape of OpenAI's
API."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse
from grpc import StatusCode

from cluster.frontend.admission.control import Caller
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import MEANINGS, Refusal, Refused

UNEXPECTED = Refusal(StatusCode.INTERNAL, "an error in the server, which has logged it")
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


def refusal_response(refusal: Refusal) -> JSONResponse:
    headers = dict(refusal.headers)
    if refusal.code is StatusCode.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(
        refusal_body(refusal), status_code=MEANINGS[refusal.code].http, headers=headers
    )
