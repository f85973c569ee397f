"""Sends JSON that may be long: in parts, while other calls go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.frontend.json_codec import json_pieces

_PART_BYTES = 1 << 16
"""About so much is sent at once; to make it takes some 3 ms."""


class LongJson(Response):
    """An answer that may hold long arrays."""

    def __init__(
        self, value: Any, turns: asyncio.Lock, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._value = value
        self._turns = turns
        self._more = headers or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, json_pieces(self._value), self._turns, self._more)


async def send_json(
    send: Send, pieces: Iterable[str], turns: asyncio.Lock, more: Mapping[str, str]
) -> None:
    """A whole answer with these `more` headers; `turns`: of all answers of this process."""
    first, *others = islice(pieces := iter(pieces), 2)
    headers = [(b"content-type", b"application/json"), *header_lines(more)]
    if not others:
        headers.append((b"content-length", str(len(first.encode())).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send_pieces(send, chain([first], others, pieces), turns)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def header_lines(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def send_pieces(send: Send, pieces: Iterable[str], turns: asyncio.Lock) -> None:
    """What comes next of an answer. Log-probabilities may be more than Serve's processes pass on in
    one message, and to write them takes seconds; of all long answers one part is made at a time,
    and between two parts all else goes on."""
    parts = _parts(pieces)
    part: bytes | None = next(parts)
    while part is not None:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        if len(part) < _PART_BYTES:
            return
        async with turns:
            await asyncio.sleep(0)
            part = next(parts, None)


def _parts(pieces: Iterable[str]) -> Iterator[bytes]:
    """All but the last have _PART_BYTES or more; at least one."""
    part = bytearray()
    for piece in pieces:
        part += piece.encode()
        if len(part) >= _PART_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part)
