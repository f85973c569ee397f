"""Proves: what Serve calls in a proxy's process makes uvicorn and gRPC take the limits. That Serve
calls it, and in time, is proved on real Serve (tests/integration/test_proxy_limits.py).
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import uvicorn
from grpc._cython import cygrpc
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.http_util import validate_http_proxy_callback_return
from ray.serve._private.utils import call_function_from_import_path
from ray.serve.config import gRPCOptions
from uvicorn.config import HTTP_PROTOCOLS

from cluster.app import LIMIT_PROXY, SERVICER_FUNCTIONS
from cluster.frontend.proxy import limits
from cluster.frontend.proxy.bounded_http import BoundedHttp
from cluster.frontend.proxy.broken import WholeAnswers
from cluster.frontend.proxy.headers import ReadableHeaders


async def nothing(scope: object, receive: object, send: object) -> None:
    """An ASGI application."""


def protocol() -> object:
    """What uvicorn takes, if it is told nothing."""
    config = uvicorn.Config(nothing, lifespan="off", log_config=None)
    config.load()
    return config.http_protocol_class


def test_a_servicer_function_limits_http_where_the_variable_is_not_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    assert protocol() is not BoundedHttp
    functions = gRPCOptions(grpc_servicer_functions=list(SERVICER_FUNCTIONS))
    for function in functions.grpc_servicer_func_callable:
        function(Mock(), Mock())
    assert protocol() is BoundedHttp


def test_serve_can_call_it_and_the_servers_take_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[tuple[str, int]] = []
    for name in ("cluster.frontend.proxy.limits", gRPCGenericServer.__module__):
        monkeypatch.setattr(f"{name}.DEFAULT_GRPC_SERVER_OPTIONS", options)
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    given = validate_http_proxy_callback_return(call_function_from_import_path(LIMIT_PROXY))
    assert [middleware.cls for middleware in given] == [WholeAnswers, ReadableHeaders]
    assert protocol() is BoundedHttp
    assert ("grpc.max_concurrent_streams", limits.STREAMS_MAX) in options
    # A name that it does not know gRPC passes over.
    known = Path(cygrpc.__file__).read_bytes()
    assert all(name.encode() in known for name, _ in options)


def test_serve_makes_its_server_of_the_list_that_is_extended() -> None:
    assert gRPCGenericServer.__init__.__globals__["DEFAULT_GRPC_SERVER_OPTIONS"] is (
        limits.DEFAULT_GRPC_SERVER_OPTIONS
    )
