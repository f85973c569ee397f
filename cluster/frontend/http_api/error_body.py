"""The body of an error, in OpenAI's shape. Imports nothing heavy: Serve's proxies need it, too."""

from __future__ import annotations

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_body(code: str, message: str, status: int, param: str = "") -> dict[str, object]:
    """`code` is gRPC's name of the status, `param` the field that is wrong."""
    param = param.encode("utf-8", "replace").decode()
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param or None, "code": code}}
