"""What keeps web pages out: Host, Origin and Content-Type of every HTTP request.

A page of any site can make a browser on this machine send requests here. It cannot choose these
three headers. Host must be no name that others may own (DNS rebinding), Origin must be this very
host, and a body must be JSON, which a browser sends to no other host unasked.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.config import ClusterConfig
from cluster.frontend.http_api.errors import error_response

HEALTH = ("/healthz", "/readyz")
"""Open to every caller by whatever name: they tell nothing of requests."""
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class HttpGuard:
    """ASGI middleware that answers a request by itself if it is not to be served."""

    def __init__(self, app: ASGIApp, config: ClusterConfig) -> None:
        self._app = app
        server = config.server
        # A page has no key, so with keys any name may be used.
        self._hosts = None if config.auth.has_keys else server.http_hosts
        self._origins = server.http_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in HEALTH:
            refused = refusal_of_headers(
                scope["method"], Headers(scope=scope), self._hosts, self._origins
            )
            if refused is not None:
                status, reason = refused
                response = error_response("INVALID_ARGUMENT", reason, status)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def refusal_of_headers(
    method: str, headers: Headers, hosts: Sequence[str] | None, origins: Sequence[str]
) -> tuple[int, str] | None:
    """HTTP status and reason, or None. `hosts`: names that may be used; None for any name."""
    host = headers.get("host", "")
    if hosts is not None and host and not _is_ours(host, hosts):
        return 421, (
            f"host: {host!r} is not a name of this server; use an address or localhost, or name it"
            " in server.http_hosts"
        )
    for origin in headers.getlist("origin"):
        if origin not in origins and not _same_host(origin, host):
            return 403, (
                f"origin: pages of {origin!r} are not served; name it in server.http_origins"
            )
    if method in ("POST", "PUT", "PATCH"):
        given = headers.get("content-type", "")
        if given.partition(";")[0].strip().lower() != "application/json":
            return 415, f"content-type: must be application/json, is {given!r}"
    return None


def _is_ours(host: str, names: Sequence[str]) -> bool:
    """An address is always accepted: no name server can point one here."""
    name = _without_port(host.lower()).rstrip(".")
    if name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (":" not in name or name.endswith("]")) else host


def _same_host(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return False
    default = _DEFAULT_PORTS.get(parts.scheme)
    if default is None or not host:
        return False
    return parts.netloc.removesuffix(default) == host.lower().removesuffix(default)
