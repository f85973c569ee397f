"""The same service over HTTP: health for load balancers, and unary generation as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from grpc import StatusCode

from cluster.ingress import Ingress, Refused
from protos import lockstep_pb2 as pb

HTTP_STATUS: Mapping[StatusCode, int] = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: 499,
    StatusCode.INTERNAL: 500,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}


def http_app(ingress: Ingress) -> FastAPI:
    """Routes /healthz (this process lives), /readyz (a replica is ready) and /v1/generate."""
    app = FastAPI(title="Lockstep", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok")

    @app.get("/readyz")
    async def readyz() -> PlainTextResponse:
        ready = await ingress.ready()
        return PlainTextResponse(*(("ready", 200) if ready else ("no replica is ready", 503)))

    @app.post("/v1/generate")
    async def generate(request: Request) -> JSONResponse:
        """The fields of GenerateRequest and GenerateResponse, as in the proto."""
        try:
            message = ParseDict(await request.json(), pb.GenerateRequest())
            answer = await ingress.answer(message)
        except (ParseError, ValueError) as error:
            return _error(StatusCode.INVALID_ARGUMENT, str(error))
        except Refused as refused:
            return _error(refused.refusal.code, refused.refusal.message)
        return JSONResponse(MessageToDict(answer, preserving_proto_field_name=True))

    return app


def _error(code: StatusCode, message: str) -> JSONResponse:
    content: dict[str, Any] = {"code": code.name, "message": message}
    return JSONResponse({"error": content}, status_code=HTTP_STATUS.get(code, 500))
