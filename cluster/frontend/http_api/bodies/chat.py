"""The body of /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, field_validator, model_validator

from cluster.error_messages import shown_value
from cluster.frontend.admission.control import Caller
from cluster.frontend.calls import GenerateCall
from cluster.frontend.http_api.bodies.generation import GenerationRequest
from cluster.frontend.http_api.bodies.parts import (
    AnyToolChoice,
    FunctionPart,
    Message,
    TemplateOptions,
    tool_use_of,
)
from cluster.frontend.prompts import Prompt
from cluster.frontend.tools import FunctionName, NamedTool, Tool, ToolChoice, ToolUse


class ChatRequest(GenerationRequest, TemplateOptions, BaseModel):
    logprobs_field: ClassVar = "top_logprobs"
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tool_choice: AnyToolChoice = "auto"
    parallel_tool_calls: bool = True
    functions: list[FunctionPart] = []
    function_call: Literal["none", "auto"] | FunctionName = "auto"
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    thinking_token_budget: int | None = None
    echo: bool = False
    add_special_tokens: bool = False
    input_ids: list[int] | None = None

    @field_validator("kv_transfer_params")
    @classmethod
    def _ids_of_a_prompt(cls, params: dict[str, Any]) -> dict[str, Any]:
        ids = params.get("prompt_token_ids", [])
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError(f"prompt_token_ids must be token ids, is {shown_value(ids)}")
        return params

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _what_chat_fields_need(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        if self.functions and self.tools:
            raise ValueError("functions: tools are given as well")
        if not self.separate_reasoning and (self.tools or self.functions):
            raise ValueError("separate_reasoning: must be true with tools")
        if not self.separate_reasoning and not self.include_reasoning:
            raise ValueError("separate_reasoning: must be true without include_reasoning")
        return self

    @property
    def calls_functions(self) -> bool:
        """Whether calls are told of as they were before there were tools."""
        return bool(self.functions)

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        # Some clients send both.
        return super().limit

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        options = template_options(self.reasoning_effort, self.enable_thinking)
        return (
            self.chat_prompt(
                self.messages,
                self.tool_use,
                options | self.chat_template_kwargs,
                special_tokens=self.add_special_tokens,
                ids=self.given_ids,
            ),
        )

    @property
    def given_ids(self) -> list[int] | None:
        """The prompt's tokens, by SGLang's name, or as vLLM's routers pass them on."""
        if self.input_ids is not None:
            return self.input_ids
        ids: list[int] | None = self.kv_transfer_params.get("prompt_token_ids")
        return ids

    @property
    def echoed_turn(self) -> str:
        """What the answer repeats of the last turn, if it is the assistant's."""
        last = self.messages[-1]
        return last.content or "" if self.echo and last.role == "assistant" else ""

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
            separate_reasoning=self.separate_reasoning,
            stream_reasoning=self.stream_reasoning,
            thinking_token_budget=None if budget == -1 else budget,  # others' word for no limit
        )


def template_options(effort: str | None, thinks: bool | None = None) -> dict[str, Any]:
    """What a chat template is told of reasoning."""
    options: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none" and thinks is None:
        thinks = False
    # Templates know either name.
    return options if thinks is None else options | {"enable_thinking": thinks, "thinking": thinks}
