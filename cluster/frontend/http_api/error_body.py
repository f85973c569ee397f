"""The body of an error, in OpenAI's shape. Imports nothing heavy: Serve's proxies need it, too."""

from __future__ import annotations

_KINDS = {
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", "not_allowed"),
    404: ("invalid_request_error", "not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "server_error"),
    503: ("server_error", "service_unavailable"),
    504: ("server_error", "deadline_exceeded"),
}
"""OpenAI's type and code, by the status of HTTP; more exact codes come with the error."""


def error_body(
    name: str, message: str, status: int, param: str = "", code: str = ""
) -> dict[str, object]:
    """`name` is gRPC's of the status, `param` the field that is wrong, `code` OpenAI's word."""
    other = ("invalid_request_error", None) if status < 500 else ("server_error", None)
    kind, usual = _KINDS.get(status, other)
    param = param.encode("utf-8", "replace").decode()
    error = {"message": message, "type": kind, "param": param or None, "code": code or usual}
    return {"error": error | {"status": name}}
