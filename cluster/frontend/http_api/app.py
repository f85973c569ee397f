"""The HTTP application: health for load balancers, and OpenAI's API."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse, Response

from cluster.frontend.http_api.body import BodyReader
from cluster.frontend.http_api.errors import refusal_response
from cluster.frontend.http_api.guard import HttpGuard
from cluster.frontend.http_api.openai_api import openai_router
from cluster.frontend.http_api.tokens_api import tokens_router
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import Refused


def http_app(service: FrontendService) -> FastAPI:
    """Also routes /healthz (this process lives) and /readyz (a replica is ready)."""
    app = FastAPI(title="Lockstep", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HttpGuard, config=service.config)
    if origins := service.config.server.http_origins:
        # The outer one: it answers a browser that asks whether it may send JSON.
        headers = ["authorization", "content-type"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_headers=headers)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return refusal_response(error.refusal)

    bodies = BodyReader(service.config.frontend.message_bytes_max)

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok")

    @app.get("/readyz")
    async def readyz() -> PlainTextResponse:
        ready = await service.ready()
        return PlainTextResponse(*(("ready", 200) if ready else ("no replica is ready", 503)))

    app.include_router(openai_router(service, bodies))
    app.include_router(tokens_router(service, bodies))
    return app
