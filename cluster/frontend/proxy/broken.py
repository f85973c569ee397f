"""Ends an answer whose frontend has ended in the middle of it, as a frontend would.

Serve's proxy then sends nothing, or nothing more, and the HTTP server makes a bare error 500 or a
cut connection of it. A client reads here that it may ask again, or go on behind its last event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.frontend.http_api.error_body import error_body

RETRY_AFTER = (b"retry-after", b"1")
_GONE = "the frontend of this call has ended; ask again"
_GONE_STREAM = "the frontend of this stream has ended; continue it with Last-Event-ID"
_BODY = json.dumps(error_body("UNAVAILABLE", _GONE, 503)).encode()
_EVENT = b"data: " + json.dumps(error_body("UNAVAILABLE", _GONE_STREAM, 503)).encode() + b"\n\n"


class WholeAnswers:
    """Middleware around all that Serve does with an HTTP request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, ended, events = False, False, False

        async def noting(message: Message) -> None:
            nonlocal started, ended, events
            if message["type"] == "http.response.start":
                started = True
                events = _are_events(message.get("headers", ()))
                message = _with_retry_after(message)
            elif not message.get("more_body", False):
                ended = True
            await send(message)

        await self._app(scope, receive, noting)
        if not started:
            headers = [(b"content-type", b"application/json"), RETRY_AFTER]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
        elif events and not ended:
            # What came of an event that was cut is none, and ends here.
            await send({"type": "http.response.body", "body": b"\n\n" + _EVENT})


def _are_events(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    kinds = [value for name, value in headers if name.lower() == b"content-type"]
    return any(kind.startswith(b"text/event-stream") for kind in kinds)


def _with_retry_after(message: Message) -> Message:
    """Serve's own 503, while it has no frontend, says nothing of when to ask again."""
    headers = list(message.get("headers", ()))
    names = {name.lower() for name, _ in headers}
    if message["status"] != 503 or RETRY_AFTER[0] in names:
        return message
    return {**message, "headers": [*headers, RETRY_AFTER]}
