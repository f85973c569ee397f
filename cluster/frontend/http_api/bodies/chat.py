"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, model_validator

from cluster.frontend.http_api.bodies.generation import GenerationRequest
from cluster.frontend.http_api.bodies.parts import Message, ToolPart
from cluster.frontend.prompts import ChatPrompt, Prompt
from cluster.frontend.tools import ToolChoice, ToolUse


class ChatRequest(GenerationRequest, BaseModel):
    logprobs_field: ClassVar = "top_logprobs"
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[ToolPart] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _what_chat_fields_need(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: max_completion_tokens is given as well")
        return self

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        turns = [turn.for_template for turn in self.messages]
        return (ChatPrompt.of(turns, self.tool_use, self.chat_template_kwargs),)

    @property
    def tool_use(self) -> ToolUse | None:
        return ToolUse.of(self.tools, self.tool_choice, self.parallel_tool_calls)
