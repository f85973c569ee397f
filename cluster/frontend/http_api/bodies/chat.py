"""The body of /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, model_validator

from cluster.frontend.admission.control import Caller
from cluster.frontend.calls import GenerateCall
from cluster.frontend.http_api.bodies.generation import GenerationRequest
from cluster.frontend.http_api.bodies.parts import (
    AnyToolChoice,
    FunctionPart,
    Message,
    ToolPart,
    tool_use_of,
)
from cluster.frontend.prompts import ChatPrompt, Prompt
from cluster.frontend.tools import FunctionName, NamedTool, Tool, ToolChoice, ToolUse


class ChatRequest(GenerationRequest, BaseModel):
    logprobs_field: ClassVar = "top_logprobs"
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[ToolPart] = []
    tool_choice: AnyToolChoice = "auto"
    parallel_tool_calls: bool = True
    functions: list[FunctionPart] = []
    function_call: Literal["none", "auto"] | FunctionName = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool = True
    thinking_token_budget: int | None = None

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _what_chat_fields_need(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: max_completion_tokens is given as well")
        if self.functions and self.tools:
            raise ValueError("functions: tools are given as well")
        return self

    @property
    def calls_functions(self) -> bool:
        """Whether calls are told of as they were before there were tools."""
        return bool(self.functions)

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        turns = [turn.for_template for turn in self.messages]
        options = template_options(self.reasoning_effort, self.enable_thinking)
        return (ChatPrompt.of(turns, self.tool_use, options | self.chat_template_kwargs),)

    @property
    def tool_use(self) -> ToolUse | None:
        if not self.functions:
            return tool_use_of(self.tools, self.tool_choice, self.parallel_tool_calls)
        tools = [Tool(type="function", function=function) for function in self.functions]
        named = self.function_call
        if isinstance(named, FunctionName):
            choice: ToolChoice = NamedTool(type="function", function=named)
        else:
            choice = named
        return ToolUse.of(tools, choice, parallel=False)

    def to_call(self, caller: Caller, request_id: str) -> GenerateCall:
        budget = self.thinking_token_budget
        return replace(
            super().to_call(caller, request_id),
            include_reasoning=self.include_reasoning,
            thinking_token_budget=None if budget == -1 else budget,  # others' word for no limit
        )


def template_options(effort: str | None, thinks: bool | None = None) -> dict[str, Any]:
    """What a chat template is told of reasoning."""
    options: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none" and thinks is None:
        thinks = False
    # Templates know either name.
    return options if thinks is None else options | {"enable_thinking": thinks, "thinking": thinks}
