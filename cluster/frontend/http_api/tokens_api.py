"""The target's tokens over HTTP, as other servers have them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from cluster.frontend.calls import check_prompt
from cluster.frontend.http_api.bodies import (
    Detokenize,
    IgnoredNames,
    Taken,
    Tokenize,
    TokensRequest,
    taken,
)
from cluster.frontend.http_api.edge import check_model, checked_caller, read_body
from cluster.frontend.http_api.long_json import LongJson
from cluster.frontend.json_codec import json_array
from cluster.frontend.service import FrontendService
from cluster.frontend.target_text import TargetText
from scheduler.errors import InvalidRequest


def tokens_router(service: FrontendService, unknown: IgnoredNames) -> APIRouter:
    router, bytes_max = APIRouter(), service.config.frontend.message_bytes_max
    refuse_unknown = service.config.server.unknown_fields == "refuse"

    async def read(request: Request, kind: type[TokensRequest]) -> Taken:
        check = partial(taken, kind, refuse_unknown=refuse_unknown)
        given = await read_body(request, bytes_max, check)
        unknown.note(given.ignored)
        check_model(service, given.body.model)
        return given

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        caller = checked_caller(service, request)
        text = service.text
        with service.refusals():
            given = await read(request, Tokenize)
            asked = given.body
            prompt = asked.to_tokenize
            # Unlike a call's, a text may be empty here.
            if asked.prompt != "":
                check_prompt(prompt, service.config)
        async with service.tokenizing(caller) as turn:
            encode, _ = await service.encoding(prompt, turn.admitted.tenant)
            tokens = await turn.run(_packed, encode)
            turn.admitted.spend(len(tokens))
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": text.context_len,
            "tokens": json_array(tokens, int),
            "token_strs": None,
        }
        if asked.return_token_strs:
            names = cache(lambda token: text.tokenizer.id_to_token(token) or "")
            answer["token_strs"] = json_array(tokens, names)
        return LongJson(answer, service.writing, given.headers)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        caller = checked_caller(service, request)
        with service.refusals():
            given = await read(request, Detokenize)
            asked = given.body
            most = service.config.scheduler.prompt_tokens_max
            if len(asked.tokens) > most:
                raise InvalidRequest("tokens", f"{len(asked.tokens)} given, at most {most} allowed")
        async with service.tokenizing(caller) as turn:
            turn.admitted.spend(len(asked.tokens))
            prompt = await turn.run(_decoded, service.text, asked.tokens)
        return LongJson({"prompt": prompt}, service.writing, given.headers)

    @router.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        """As vLLM has it: the tokenizer's settings."""
        checked_caller(service, request)
        return LongJson(service.text.tokenizer_info, service.writing)

    return router


def _packed(encode: Callable[[], Sequence[int]]) -> Sequence[int]:
    """Tokens in a tenth of the memory: many answers may wait to be sent."""
    return array("I", encode())


def _decoded(text: TargetText, tokens: list[int]) -> str:
    """Raises InvalidRequest."""
    most = text.spec.vocab_size - 1
    for token in tokens:
        if not 0 <= token <= most:
            raise InvalidRequest("tokens", f"must be token ids from 0 to {most}, one is {token}")
    return text.tokenizer.decode(tokens, skip_special_tokens=False)
