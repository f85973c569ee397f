"""The bodies of /tokenize and /detokenize, as vLLM's."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from cluster.frontend.http_api.bodies.check import Known
from cluster.frontend.http_api.bodies.parts import Message, TemplateOptions
from cluster.frontend.prompts import ChatPrompt, TextPrompt
from cluster.frontend.tools import ToolUse


class TokensRequest(Known):
    model: str | None = None


class Tokenize(TokensRequest, TemplateOptions):
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _what_goes_together(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: exactly one of prompt and messages must be given")
        if self.messages is None:
            for name in TemplateOptions.model_fields:
                if getattr(self, name):
                    raise ValueError(f"{name}: only with messages")
        return self

    @property
    def tool_use(self) -> ToolUse | None:
        return ToolUse.of(self.tools, "auto", parallel=True)

    @property
    def to_tokenize(self) -> TextPrompt | ChatPrompt:
        if self.messages is None:
            return TextPrompt(self.prompt or "", self.add_special_tokens is not False)
        special = self.add_special_tokens is True
        return self.chat_prompt(
            self.messages, self.tool_use, self.chat_template_kwargs, special_tokens=special
        )


class Detokenize(TokensRequest):
    tokens: list[int]
