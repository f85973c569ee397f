"""Takes away from an HTTP request what Serve's proxy decodes and cannot.

A header's value may be any bytes. Of a few headers the proxy makes text, as UTF-8 only, and answers
a plain error 500 where that fails. They are its own or a hint, so a request goes on without them.
"""

from __future__ import annotations

from ray.serve._private import constants
from starlette.types import ASGIApp, Receive, Scope, Send


def _as_serve_compares(name: str) -> str:
    return name.lower().replace("-", "_")


_DECODED = frozenset(
    _as_serve_compares(name)
    for name in (
        constants.SERVE_HTTP_REQUEST_ID_HEADER,
        constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        constants.SERVE_MULTIPLEXED_MODEL_ID,
        constants.SERVE_SESSION_ID,
    )
)
"""No others: a header that says for whom a call was passed on must not get lost here."""


class ReadableHeaders:
    """Middleware around all that Serve does with a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            left = [header for header in scope["headers"] if _is_readable(*header)]
            scope = {**scope, "headers": left}
        await self._app(scope, receive, send)


def _is_readable(name: bytes, value: bytes) -> bool:
    if _as_serve_compares(name.decode("latin-1")) not in _DECODED:
        return True
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
