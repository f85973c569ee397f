"""Reads a JSON body within bounds of size and time, and parses long ones off the event loop."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request

from cluster.frontend.json_text import parsed_json
from scheduler.errors import InvalidRequest

_BODY_S = 30.0
"""How long a body may take to come in."""
_PARSE_INLINE_BYTES = 16_384
"""A longer body is parsed on a thread: 100,000 token ids take about 0.15 s."""
_PARSER = ThreadPoolExecutor(1, "parser")
"""Long bodies take turns: parsing holds the GIL, so more threads would hold up the event loop."""
T = TypeVar("T")


async def read_body(request: Request, bytes_max: int, parse: Callable[[dict[str, Any]], T]) -> T:
    """What `parse` makes of the body's fields; it may raise InvalidRequest, too.

    Raises InvalidRequest for a body that is too long, too slow or no JSON object.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > bytes_max:
                    raise InvalidRequest("request", f"the body has more than {bytes_max} bytes")
    except TimeoutError:
        reason = f"the body did not come within {_BODY_S:.0f} s"
        raise InvalidRequest("request", reason) from None
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
