"""The HTTP application: health for load balancers, /v1/generate, and OpenAI's API."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from cluster.frontend.grpc_api.api import whole_answer
from cluster.frontend.http_api.body import BodyReader
from cluster.frontend.http_api.errors import caller_of, refusal_response
from cluster.frontend.http_api.guard import HttpGuard
from cluster.frontend.http_api.openai_api import openai_router
from cluster.frontend.http_api.tokens_api import tokens_router
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import Refused
from cluster.sentences import did_you_mean
from protos import lockstep_pb2 as pb
from scheduler.errors import InvalidRequest

_FIELDS = frozenset(pb.GenerateRequest.DESCRIPTOR.fields_by_name)
_NAMED = re.compile(r"Failed to parse ([a-z_]+) field|at GenerateRequest\.(\w+)")
"""How protobuf names the field that holds a wrong value."""


def http_app(service: FrontendService) -> FastAPI:
    """Also routes /healthz (this process lives) and /readyz (a replica is ready)."""
    app = FastAPI(title="Lockstep", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HttpGuard, config=service.config)
    if origins := service.config.server.http_origins:
        # The outer one: it answers a browser that asks whether it may send JSON.
        headers = ["authorization", "content-type"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_headers=headers)
    bodies = BodyReader(service.config.frontend.message_bytes_max)

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok")

    @app.get("/readyz")
    async def readyz() -> PlainTextResponse:
        ready = await service.ready()
        return PlainTextResponse(*(("ready", 200) if ready else ("no replica is ready", 503)))

    @app.post("/v1/generate")
    async def generate(request: Request) -> Response:
        """The fields of GenerateRequest and GenerateResponse, as in the proto."""
        caller = caller_of(request)
        try:
            service.check_caller(caller)
            with service.refusals():
                message = await bodies.read(request, _message)
            answer = await whole_answer(service, message, caller)
        except Refused as refused:
            return refusal_response(refused.refusal)
        return JSONResponse(MessageToDict(answer, preserving_proto_field_name=True))

    app.include_router(openai_router(service, bodies))
    app.include_router(tokens_router(service, bodies))
    return app


def _message(fields: dict[str, Any]) -> pb.GenerateRequest:
    """Raises InvalidRequest for what is no request in JSON."""
    for name in fields:
        if name not in _FIELDS:
            raise InvalidRequest(name, f"unknown name{did_you_mean(name, _FIELDS)}")
    try:
        return ParseDict(fields, pb.GenerateRequest())
    except (ParseError, ValueError, RecursionError, OverflowError, SystemError) as error:
        # OverflowError comes of an integer that no float can hold; SystemError is what protobuf
        # makes of a text that holds half a surrogate pair.
        said = str(error)
        named = _NAMED.search(said)
        field = (named[1] or named[2]) if named else "request"
        raise InvalidRequest(field, said) from None
