"""The target's tokens over HTTP, as other servers have them; /health and /version."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from cluster.frontend.calls import ChatPrompt, TextPrompt
from cluster.frontend.http_api.body import BodyReader
from cluster.frontend.http_api.errors import checked_caller
from cluster.frontend.http_api.openai_fields import Message
from cluster.frontend.service import FrontendService
from cluster.sentences import Strict, validated
from scheduler.errors import InvalidRequest


class Tokenize(Strict):
    prompt: str | None = None
    messages: list[Message] | None = None
    model: str = ""
    return_token_strs: bool = False


class Detokenize(Strict):
    tokens: list[int]
    model: str = ""


def tokens_router(service: FrontendService, bodies: BodyReader) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> PlainTextResponse:
        """200 while a replica is ready."""
        return PlainTextResponse("", 200 if await service.ready() else 503)

    @router.get("/version")
    async def versions() -> JSONResponse:
        return JSONResponse({"version": version("lockstep")})

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        checked_caller(service, request)
        with service.refusals():
            asked = await bodies.read(request, partial(validated, Tokenize))
            tokens = list(await service.tokens(_prompt(asked)))
        text = service.text
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": text.context_len,
            "tokens": tokens,
        }
        if asked.return_token_strs:
            names = [text.token_bytes(token).decode(errors="replace") for token in tokens]
            answer["token_strs"] = names
        return JSONResponse(answer)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        checked_caller(service, request)
        with service.refusals():
            asked = await bodies.read(request, partial(validated, Detokenize))
            for token in asked.tokens:
                if not 0 <= token < service.text.spec.vocab_size:
                    raise InvalidRequest("tokens", f"token id {token} is not in the vocabulary")
        decode = service.text.tokenizer.decode
        return JSONResponse({"prompt": decode(asked.tokens, skip_special_tokens=False)})

    return router


def _prompt(asked: Tokenize) -> TextPrompt | ChatPrompt:
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("prompt", "exactly one of prompt and messages must be given")
    if asked.messages is not None:
        return ChatPrompt([turn.for_template for turn in asked.messages])
    return TextPrompt(asked.prompt or "")
