"""What keeps web pages out: Host, Origin and Content-Type of HTTP requests.

A page of any site can make a browser on this machine send requests here. It cannot choose these
three headers. Host must be no name that others may own (DNS rebinding), Origin must be this very
host, and a body must be JSON, which a browser sends to no other host unasked.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import urlsplit

from fastapi import HTTPException, Request

from cluster.config import ClusterConfig

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def guard_of(config: ClusterConfig) -> Callable[[Request], Awaitable[None]]:
    """A dependency of routes, which raises HTTPException for a request that is not to be served.
    Health does without: it is open to every caller by whatever name."""
    origins = config.server.http_origins
    # A page has no key, so with keys any name may be used.
    hosts = None if config.auth.has_keys else config.server.http_hosts

    async def guard(request: Request) -> None:
        host = request.headers.get("host", "")
        if hosts is not None and host and not _is_ours(host, hosts):
            said = f"host: {host!r} is not a name of this server; use an address or localhost, or"
            raise HTTPException(421, f"{said} name it in server.http_hosts")
        for origin in request.headers.getlist("origin"):
            if origin not in origins and not _same_host(origin, host):
                said = f"origin: pages of {origin!r} are not served"
                raise HTTPException(403, f"{said}; name it in server.http_origins")
        given = request.headers.get("content-type", "")
        kind = given.partition(";")[0].strip().lower()
        if request.method in ("POST", "PUT", "PATCH") and kind != "application/json":
            raise HTTPException(415, f"content-type: must be application/json, is {given!r}")

    return guard


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
