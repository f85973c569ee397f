"""What is asked of the server itself: its model, its load, its description, its version."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from cluster import lockstep_version
from cluster.frontend.http_api.bodies.openapi import document, page
from cluster.frontend.http_api.edge import check_model, checked_caller
from cluster.frontend.service import FrontendService


def server_router(service: FrontendService) -> APIRouter:
    router, served = APIRouter(), _model(service)
    described = document(service.config.server.root_path)
    shown = page(described)

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        checked_caller(service, request)
        with service.refusals():
            service.check_able()
        return JSONResponse({"object": "list", "data": [served]})

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        checked_caller(service, request)
        with service.refusals():
            check_model(service, name)
        return JSONResponse(served)

    @router.get("/load")
    async def load(request: Request) -> Response:
        """As vLLM has it."""
        checked_caller(service, request)
        return JSONResponse({"server_load": service.router.unfinished})

    @router.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        checked_caller(service, request)
        return JSONResponse(described)

    @router.get("/docs")
    async def docs(request: Request) -> Response:
        checked_caller(service, request)
        return HTMLResponse(shown)

    @router.get("/version")
    async def versions() -> JSONResponse:
        return JSONResponse({"version": lockstep_version()})

    return router


def _model(service: FrontendService) -> dict[str, Any]:
    """The served model, with the fields of OpenAI's API and of vLLM's."""
    config, created = service.config, int(time.time())
    name = config.model_name
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "lockstep",
        "root": config.replica.target,
        "parent": None,
        "max_model_len": service.text.context_len,
        "permission": [permission],
    }
