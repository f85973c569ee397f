"""Sends JSON that may be long: in parts, while other calls go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.frontend.json_text import json_pieces

_PART_BYTES = 1 << 18
"""About so much is sent at once."""


class LongJson(Response):
    """An answer that may hold long arrays."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, json_pieces(self._value))


async def send_json(send: Send, pieces: Iterable[str]) -> None:
    """A whole answer."""
    first, *others = islice(pieces := iter(pieces), 2)
    headers = [(b"content-type", b"application/json")]
    if not others:
        headers.append((b"content-length", str(len(first.encode())).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send_pieces(send, chain([first], others, pieces))
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_pieces(send: Send, pieces: Iterable[str]) -> None:
    """What comes next of an answer. Log-probabilities may be more than Serve's processes pass on in
    one message, and to write them takes seconds."""
    part = bytearray()
    for piece in pieces:
        part += piece.encode()
        if len(part) >= _PART_BYTES:
            await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
            part.clear()
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
