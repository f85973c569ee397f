"""Proves: of a request's headers only those are left out that Serve's proxy cannot decode."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.serve._private import http_util

from cluster.config import ClusterConfig
from cluster.frontend.proxy.headers import middlewares
from cluster.run import ray_environment

BYTES = b"\xff\xfe"
NAMES = (
    *(b"x-request-id", b"X-Request-Id", b"x-session-id", b"x_session_id"),
    *(b"serve_multiplexed_model_id", b"Serve-Multiplexed-Model-Id"),
    *(b"x-request-timeout-seconds", b"x-request-disconnect-disabled"),
)


def passed(*headers: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """What reaches the application behind the middlewares that Serve gets."""
    seen: list[list[tuple[bytes, bytes]]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])

    app: Any = application
    for middleware in http_util.validate_http_proxy_callback_return(middlewares()):
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
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


def test_serve_finds_what_it_is_told_to_call() -> None:
    told = ray_environment(ClusterConfig())["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    assert told == f"{middlewares.__module__}.{middlewares.__name__}"
