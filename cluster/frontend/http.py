"""The HTTP edge: health for load balancers, and unary generation as JSON."""

from __future__ import annotations

import asyncio
import json
import re

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from cluster.frontend.admission.control import Caller
from cluster.frontend.grpc_api.api import whole_answer
from cluster.frontend.http_errors import refusal_response
from cluster.frontend.http_guard import HttpGuard
from cluster.frontend.service import FrontendService
from cluster.frontend.status_codes import Refused
from cluster.sentences import did_you_mean
from protos import lockstep_pb2 as pb
from scheduler.errors import InvalidRequest

_FIELDS = frozenset(pb.GenerateRequest.DESCRIPTOR.fields_by_name)
_NAMED = re.compile(r"Failed to parse ([a-z_]+) field|at GenerateRequest\.(\w+)")
"""How protobuf names the field that holds a wrong value."""
_BODY_S = 30.0
"""How long a body may take to come in."""
_PARSE_INLINE_BYTES = 16_384
"""A longer body is parsed on a thread: 100,000 token ids take about 0.15 s."""


def http_app(service: FrontendService) -> FastAPI:
    """Routes /healthz (this process lives), /readyz (a replica is ready) and /v1/generate."""
    app = FastAPI(title="Lockstep", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HttpGuard, config=service.config)
    if origins := service.config.server.http_origins:
        # The outer one: it answers a browser that asks whether it may send JSON.
        headers = ["authorization", "content-type"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_headers=headers)
    # Long bodies one after the other: several would take longer all together, and more memory.
    parsing = asyncio.Lock()

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok")

    @app.get("/readyz")
    async def readyz() -> PlainTextResponse:
        ready = await service.ready()
        return PlainTextResponse(*(("ready", 200) if ready else ("no replica is ready", 503)))

    @app.post("/v1/generate")
    async def generate(request: Request) -> JSONResponse:
        """The fields of GenerateRequest and GenerateResponse, as in the proto."""
        address = request.client.host if request.client else ""
        caller = Caller.from_headers(request.headers.items(), address)
        try:
            service.check_caller(caller)
            bytes_max = service.config.ingress.message_bytes_max
            with service.refusals():
                message = await _parsed(await _body(request, bytes_max), parsing)
            answer = await whole_answer(service, message, caller)
        except Refused as refused:
            return refusal_response(refused.refusal)
        return JSONResponse(MessageToDict(answer, preserving_proto_field_name=True))

    return app


async def _body(request: Request, bytes_max: int) -> bytes:
    """Raises InvalidRequest for a body that is too long or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > bytes_max:
                    raise InvalidRequest("request", f"the body has more than {bytes_max} bytes")
    except TimeoutError:
        raise InvalidRequest("request", f"the body did not come within {_BODY_S:.0f} s") from None
    return bytes(body)


async def _parsed(body: bytes, parsing: asyncio.Lock) -> pb.GenerateRequest:
    """Raises InvalidRequest for what is no request in JSON."""
    # How many ids are too many is known to the service, which takes messages only.
    if len(body) <= _PARSE_INLINE_BYTES:
        return _message(body)
    async with parsing:
        return await asyncio.to_thread(_message, body)


def _message(body: bytes) -> pb.GenerateRequest:
    """Raises InvalidRequest for what is no request in JSON."""
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            raise ValueError("the body must be a JSON object")
        for name in fields:
            if name not in _FIELDS:
                raise InvalidRequest(name, f"unknown name{did_you_mean(name, _FIELDS)}")
        return ParseDict(fields, pb.GenerateRequest())
    except (ParseError, ValueError, RecursionError, OverflowError, SystemError) as error:
        # OverflowError comes of an integer that no float can hold; SystemError is what protobuf
        # makes of a name that holds half a surrogate pair.
        said = str(error)
        named = _NAMED.search(said)
        field = (named[1] or named[2]) if named else "request"
        raise InvalidRequest(field, said) from None
