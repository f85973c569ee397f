"""The target's tokens over HTTP, as other servers have them; /version."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, Self, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import model_validator

from cluster.error_messages import Strict, validated
from cluster.frontend.calls import check_prompt
from cluster.frontend.http_api.edge import check_model, checked_caller, read_body
from cluster.frontend.http_api.long_json import LongJson
from cluster.frontend.http_api.openai_fields import Message, without_nulls
from cluster.frontend.json_codec import json_array
from cluster.frontend.prompts import ChatPrompt, TextPrompt
from cluster.frontend.service import FrontendService
from cluster.frontend.target_text import TargetText
from cluster.frontend.tools import Tool, ToolUse
from scheduler.errors import InvalidRequest


class _Asked(Strict):
    model: str | None = None


class Tokenize(_Asked):
    """As vLLM's."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _what_goes_together(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: exactly one of prompt and messages must be given")
        if self.messages is None:
            for name in ("tools", "chat_template_kwargs"):
                if getattr(self, name):
                    raise ValueError(f"{name}: only with messages")
        elif self.add_special_tokens:
            raise ValueError("add_special_tokens: not with messages, whose template has its own")
        return self

    @property
    def tool_use(self) -> ToolUse | None:
        return ToolUse.of(self.tools or (), "auto", parallel=True)

    @property
    def to_tokenize(self) -> TextPrompt | ChatPrompt:
        if self.messages is None:
            return TextPrompt(self.prompt or "", self.add_special_tokens is not False)
        turns = [turn.for_template for turn in self.messages]
        return ChatPrompt.of(turns, self.tool_use, self.chat_template_kwargs or {})


class Detokenize(_Asked):
    tokens: list[int]


_A = TypeVar("_A", bound=_Asked)


def tokens_router(service: FrontendService) -> APIRouter:
    router, bytes_max = APIRouter(), service.config.frontend.message_bytes_max

    @router.get("/version")
    async def versions() -> JSONResponse:
        return JSONResponse({"version": version("lockstep")})

    async def read(request: Request, kind: type[_A]) -> _A:
        asked = await read_body(
            request, bytes_max, lambda given: validated(kind, without_nulls(given))
        )
        if asked.model is not None:
            check_model(service, asked.model)
        return asked

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        caller = checked_caller(service, request)
        text = service.text
        with service.refusals():
            asked = await read(request, Tokenize)
            if asked.tool_use is not None:
                # As chat would refuse them.
                service.formats.tools(asked.tool_use)
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
        }
        if asked.return_token_strs:
            names = cache(lambda token: text.token_bytes(token).decode(errors="replace"))
            answer["token_strs"] = json_array(tokens, names)
        return LongJson(answer, service.writing)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        caller = checked_caller(service, request)
        with service.refusals():
            asked = await read(request, Detokenize)
            most = service.config.scheduler.prompt_tokens_max
            if len(asked.tokens) > most:
                raise InvalidRequest("tokens", f"{len(asked.tokens)} given, at most {most} allowed")
        async with service.tokenizing(caller) as turn:
            turn.admitted.spend(len(asked.tokens))
            prompt = await turn.run(_decoded, service.text, asked.tokens)
        return LongJson({"prompt": prompt}, service.writing)

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
