"""Proves: of a request's headers only those are left out that Serve's proxy cannot decode."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.frontend.proxy.headers import ReadableHeaders

BYTES = b"\xff\xfe"
NAMES = (
    *(b"x-request-id", b"X-Request-Id", b"x-session-id", b"x_session_id"),
    *(b"serve_multiplexed_model_id", b"Serve-Multiplexed-Model-Id"),
    *(b"x-request-timeout-seconds", b"x-request-disconnect-disabled"),
)


def passed(*headers: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """What reaches the application behind the middleware that Serve gets."""
    seen: list[list[tuple[bytes, bytes]]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    app: Any = ReadableHeaders(application)
    asyncio.run(app({"type": "http", "headers": list(headers)}, None, None))
    [found] = seen
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_header_that_serve_decodes_is_left_out_if_it_is_no_text(name: bytes) -> None:
    others = [(b"host", b"localhost"), (b"x-request-ids", BYTES)]
    assert passed((name, BYTES), *others) == others
    assert passed((name, "id-é".encode()), *others) == [(name, "id-é".encode()), *others]


@pytest.mark.parametrize("name", [b"x-forwarded-for", b"forwarded", b"authorization"])
def test_a_header_that_says_who_calls_is_never_left_out(name: bytes) -> None:
    assert passed((name, BYTES)) == [(name, BYTES)]
