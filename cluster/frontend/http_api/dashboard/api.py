"""What operators see of the whole server: metrics for Prometheus, and a page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from cluster.frontend.http_api.dashboard.data import dashboard_data
from cluster.frontend.http_api.edge import caller_of
from cluster.frontend.service import FrontendService
from cluster.metrics.exposition import CONTENT_TYPE

_FILES = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the page's browser may load and call: this server alone."""


def operator_router(service: FrontendService) -> APIRouter:
    """What the server does is told to operators alone; the page's files, which tell nothing, to
    everybody."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        page = await service.metrics(caller_of(request))
        return Response(page, media_type=CONTENT_TYPE)

    @router.get("/dashboard/data")
    async def data(request: Request) -> Response:
        shards = await service.overviews(caller_of(request))
        said = dashboard_data(shards, service.config, chat=service.text.chat_template is not None)
        return JSONResponse(said, headers={"cache-control": "no-store"})

    for name, kind in _FILES.items():
        path = "/dashboard" if name == "page.html" else f"/dashboard/{name}"
        router.add_api_route(path, _served(name, kind), methods=["GET"])
    return router


def _served(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    content = files("cluster.frontend.http_api.dashboard").joinpath(name).read_bytes()
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }

    async def served() -> Response:
        return Response(content, media_type=kind, headers=headers)

    return served
