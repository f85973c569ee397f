"""Sets the limits of Serve's proxies: of HTTP requests, and of gRPC's streams; and what they say
where a frontend has ended.

Serve has no settings for them. In each proxy's process, before its servers are made, it calls what
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names: that is `limit_proxy`. Where Ray runs without that
variable there are still the limits of HTTP: Serve calls `limit_http` as one of the functions that
make gRPC's handlers, which it does before uvicorn chooses a protocol.
"""

from __future__ import annotations

from ray.serve._private.constants import DEFAULT_GRPC_SERVER_OPTIONS
from starlette.middleware import Middleware
from uvicorn.config import HTTP_PROTOCOLS

from cluster.frontend.proxy.bounded_http import BoundedHttp
from cluster.frontend.proxy.broken import WholeAnswers
from cluster.frontend.proxy.headers import ReadableHeaders

STREAMS_MAX = 512
"""Calls at once on one gRPC connection; a client's library lets more wait. A call that the client
has reset counts until the proxy has seen it."""
_PENDING_MAX = 32 * STREAMS_MAX
"""Calls that the proxy has not seen yet, of all connections. Above it, by default above 1,000, gRPC
cancels calls by chance, whoever sent them."""


def limit_http(_servicer: object = None, _server: object = None) -> None:
    """Has the arguments of a servicer function, and adds no handler."""
    HTTP_PROTOCOLS["auto"] = f"{BoundedHttp.__module__}:{BoundedHttp.__name__}"


def limit_proxy() -> list[Middleware]:
    """The middleware around all that Serve does with an HTTP request."""
    limit_http()
    DEFAULT_GRPC_SERVER_OPTIONS.extend(
        [
            ("grpc.max_concurrent_streams", STREAMS_MAX),
            ("grpc.server.max_pending_requests", _PENDING_MAX),
            ("grpc.server.max_pending_requests_hard_limit", _PENDING_MAX),
        ]
    )
    return [Middleware(WholeAnswers), Middleware(ReadableHeaders)]
