"""The HTTP application: health for load balancers, and OpenAI's API."""

from __future__ import annotations

import logging

from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from grpc import StatusCode
from starlette.exceptions import HTTPException

from cluster.frontend.http_api.bodies import IGNORED_HEADER, IgnoredNames
from cluster.frontend.http_api.dashboard.api import operator_router
from cluster.frontend.http_api.edge import UNEXPECTED, refusal_response
from cluster.frontend.http_api.error_body import error_body
from cluster.frontend.http_api.guard import guard_of
from cluster.frontend.http_api.messages import messages_router
from cluster.frontend.http_api.openai_api import openai_router
from cluster.frontend.http_api.responses import responses_router
from cluster.frontend.http_api.server_api import server_router
from cluster.frontend.http_api.tokens_api import tokens_router
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import Refusal, Refused

log = logging.getLogger("lockstep.frontend")


def http_app(service: FrontendService) -> FastAPI:
    """Also routes /healthz (this process lives), /readyz, /health and /ping (a replica is ready).

    Serve's proxy gives every request and its answer the header x-request-id, the client's own if it
    sends one: to set it here would send it twice.
    """
    app = FastAPI(
        title="Lockstep",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # `server_api` has its own
        root_path=service.config.server.root_path,
        redirect_slashes=False,  # it would send callers to whatever Host names, past the guard
    )
    if origins := service.config.server.http_origins:
        # It answers a browser that asks whether it may send JSON.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            # Clients add headers of their own, openai's for JavaScript nine x-stainless-*.
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", IGNORED_HEADER],
        )

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return refusal_response(error.refusal)

    @app.exception_handler(HTTPException)
    async def unserved(request: Request, error: HTTPException) -> Response:
        status, message = error.status_code, error.detail
        # The router's own: it knows no such path, or the path takes another method.
        code = {404: StatusCode.NOT_FOUND, 405: StatusCode.UNIMPLEMENTED}.get(status)
        if code is not None:
            message = f"{request.method} {request.url.path}: {message}"
        refusal = Refusal(code or StatusCode.INVALID_ARGUMENT, message)
        body = error_body(refusal.code.name, refusal.short_message, status)
        return JSONResponse(body, status, error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s failed", request.url.path, exc_info=error)
        return refusal_response(UNEXPECTED)

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok")

    @app.get("/ping")
    @app.post("/ping")
    @app.get("/health")
    @app.get("/readyz")
    async def readyz() -> PlainTextResponse:
        if service.ready():
            return PlainTextResponse("ready")
        return PlainTextResponse(service.unable or "no replica is ready", 503)

    guard = Depends(guard_of(service.config))
    unknown = IgnoredNames()
    app.include_router(server_router(service), dependencies=[guard])
    app.include_router(openai_router(service, unknown), dependencies=[guard])
    app.include_router(messages_router(service, unknown), dependencies=[guard])
    app.include_router(responses_router(service, unknown), dependencies=[guard])
    app.include_router(tokens_router(service, unknown), dependencies=[guard])
    app.include_router(operator_router(service), dependencies=[guard])
    return app
