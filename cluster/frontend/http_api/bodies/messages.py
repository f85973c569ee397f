"""The bodies of /v1/messages and /v1/messages/count_tokens, as Anthropic's API has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, model_validator

from cluster.error_messages import shown_value
from cluster.frontend.admission.control import Caller
from cluster.frontend.calls import GenerateCall
from cluster.frontend.http_api.bodies.chat import template_options
from cluster.frontend.http_api.bodies.check import Known
from cluster.frontend.http_api.bodies.generation import GenerationRequest
from cluster.frontend.http_api.bodies.responses import TextFormat
from cluster.frontend.prompts import REASONING_NAMES, ChatPrompt, Prompt
from cluster.frontend.structure import Structure
from cluster.frontend.tools import (
    CalledFunction,
    CallTurn,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    ToolName,
    ToolUse,
)


class Block(Known, BaseModel):  # the linter looks no further than its bases
    """A part of a turn."""

    place: ClassVar = "anthropic.messages.content."
    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[Block] = ""


class MessageTurn(Known):
    place: ClassVar = "anthropic.messages."
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """One turn, after those that the results of calls are."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        turns = [
            {"role": "tool", "content": _text(block.content), "tool_call_id": block.tool_use_id}
            for block in self.content
            if block.type == "tool_result"
        ]
        turn: dict[str, Any] = {"role": self.role, "content": _text(self.content)}
        if thought := "".join(block.thinking for block in self.content):
            turn |= dict.fromkeys(REASONING_NAMES, thought)
        calls = [
            CallTurn(
                function=CalledFunction(name=block.name, arguments=json.dumps(block.input)),
                id=block.id,
            ).for_template
            for block in self.content
            if block.type == "tool_use"
        ]
        turn |= {"tool_calls": calls} if calls else {}
        return turns if turns and not turn["content"] else [*turns, turn]


def _text(blocks: str | Sequence[Block]) -> str:
    return blocks if isinstance(blocks, str) else "".join(block.text for block in blocks)


class MessageTool(Known, BaseModel):
    place: ClassVar = "anthropic.tools."
    type: Literal["custom"] = "custom"
    name: ToolName
    description: str = ""
    input_schema: dict[str, Any] = {}
    strict: bool = False

    @property
    def as_function(self) -> Tool:
        given = self.model_dump(exclude_unset=True, exclude={"type"})
        given["parameters"] = given.pop("input_schema", {})
        return Tool(type="function", function=Function(**given))


class MessageToolChoice(Known):
    place: ClassVar = "anthropic.tool_choice."
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(Known):
    place: ClassVar = "anthropic.thinking."
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(Known):
    place: ClassVar = "anthropic.output_config."
    format: TextFormat | None = None
    effort: str | None = None


class MessagesRequest(GenerationRequest, BaseModel):
    place: ClassVar = "anthropic."
    logprobs_field: ClassVar = "logprobs"
    counts: ClassVar = False
    """Whether only the tokens of the prompt are asked for."""
    messages: list[MessageTurn]
    system: str | list[Block] = ""
    stop_sequences: list[str] = []
    tools: list[MessageTool] = []
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _what_messages_need(self) -> Self:
        if self.max_tokens is None and not self.counts:
            raise ValueError("max_tokens: must be given")
        if self.n != 1:
            raise ValueError(f"n: a message is one answer, is {shown_value(self.n)}")
        return self

    @property
    def top_logprobs_wanted(self) -> int | None:
        return None

    @property
    def structure(self) -> Structure | None:
        config = self.output_config
        asked = None if config is None else config.format
        return super().structure if asked is None else asked.structure

    @property
    def tool_use(self) -> ToolUse | None:
        tools = [tool.as_function for tool in self.tools]
        if self.tool_choice is None:
            return ToolUse.of(tools, "auto", parallel=True)
        modes: Mapping[str, ToolChoice] = {
            "auto": "auto",
            "any": "required",
            "none": "none",
            "tool": NamedTool(type="function", function=FunctionName(name=self.tool_choice.name)),
        }
        parallel = not self.tool_choice.disable_parallel_tool_use
        return ToolUse.of(tools, modes[self.tool_choice.type], parallel)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        told = [{"role": "system", "content": _text(self.system)}] if self.system else []
        turns = [part for turn in self.messages for part in turn.for_template]
        thinks = None if self.thinking is None else self.thinking.type != "disabled"
        effort = None if self.output_config is None else self.output_config.effort
        return (ChatPrompt.of([*told, *turns], self.tool_use, template_options(effort, thinks)),)

    def to_call(self, caller: Caller, request_id: str) -> GenerateCall:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        return replace(
            super().to_call(caller, request_id),
            stop=self.stop_sequences or self.stop,
            thinking_token_budget=budget,
        )


class CountTokens(MessagesRequest, BaseModel):
    counts: ClassVar = True
