"""Ends an answer whose frontend has ended in the middle of it, as a frontend would.

Serve's proxy then sends nothing, or nothing more, and the HTTP server makes a bare error 500 or a
cut connection of it. A client reads here that it may ask again, or go on behind its last event. And
a proxy that has just started, in place of one that died, knows no application for a while: it calls
every path not found.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.frontend.http_api.error_body import error_body

RETRY_AFTER = (b"retry-after", b"1")
_GONE = "the frontend of this call has ended; ask again"
_NO_APPLICATION = "no application is here yet; ask again"
_GONE_STREAM = "the frontend of this stream has ended; continue it with Last-Event-ID"
_NO_ROUTE = b"Ping http://.../-/routes for available routes."
"""How Serve ends its own 404. The application takes every path, so it means that there is none."""
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
        not_found: Message | None = None

        async def noting(message: Message) -> None:
            nonlocal started, ended, events, not_found
            if message["type"] == "http.response.start":
                started = True
                if message["status"] == 404:
                    not_found = message
                    return
                events = _are_events(message.get("headers", ()))
                message = _with_retry_after(message)
            elif not message.get("more_body", False):
                ended = True
            if not_found is not None:
                if message.get("body", b"").endswith(_NO_ROUTE):
                    await _refuse(send, _NO_APPLICATION)
                    return
                await send(not_found)
                not_found = None
            await send(message)

        await self._app(scope, receive, noting)
        if not started or (not_found is not None and not ended):
            await _refuse(send, _GONE)
        elif events and not ended:
            # What came of an event that was cut is none, and ends here.
            await send({"type": "http.response.body", "body": b"\n\n" + _EVENT})


async def _refuse(send: Send, why: str) -> None:
    headers = [(b"content-type", b"application/json"), RETRY_AFTER]
    body = json.dumps(error_body("UNAVAILABLE", why, 503)).encode()
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


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
