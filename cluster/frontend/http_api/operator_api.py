"""What operators see of the whole server: metrics for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from cluster.frontend.http_api.edge import caller_of
from cluster.frontend.service import FrontendService
from cluster.metrics.exposition import CONTENT_TYPE


def operator_router(service: FrontendService) -> APIRouter:
    """Open on the server's own machine, elsewhere to keys with the right."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        page = await service.metrics(caller_of(request))
        return Response(page, media_type=CONTENT_TYPE)

    return router
