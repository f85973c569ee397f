"""The body of /v1/responses: items in, and the call that they make."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from cluster.error_messages import Strict, shown_value
from cluster.frontend.admission.control import Caller
from cluster.frontend.calls import GenerateCall
from cluster.frontend.http_api.bodies.chat import template_options
from cluster.frontend.http_api.bodies.check import Known
from cluster.frontend.http_api.bodies.generation import GenerationRequest
from cluster.frontend.http_api.bodies.parts import (
    AllowedTools,
    AllowedToolsChoice,
    AnyToolChoice,
    tool_use_of,
)
from cluster.frontend.prompts import REASONING_NAMES, ChatPrompt, Prompt
from cluster.frontend.structure import Structure
from cluster.frontend.tools import (
    CalledFunction,
    CallTurn,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolUse,
)
from scheduler.errors import InvalidRequest

Turn = Mapping[str, Any]
"""Of a conversation, as a chat template wants it."""
_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class Item(Known, BaseModel):  # the linter looks no further than its bases
    """What stands in the input: a message, a call, what a call gave, or reasoning."""

    place: ClassVar = "responses.input."
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str = ""
    content: str | list[dict[str, Any]] = ""
    summary: list[dict[str, Any]] = []
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[dict[str, Any]] = ""

    @model_validator(mode="after")
    def _what_its_type_needs(self) -> Self:
        if self.type == "message" and not self.role:
            raise ValueError("role: a message needs one")
        if self.type == "function_call":
            CalledFunction(name=self.name, arguments=self.arguments)
        for parts in (self.content, self.output, self.summary):
            _text(parts)
        return self


def _text(parts: str | Sequence[Mapping[str, Any]]) -> str:
    """Raises ValueError for a part that is no text."""
    if isinstance(parts, str):
        return parts
    texts = []
    for part in parts:
        text = part.get("refusal" if part.get("type") == "refusal" else "text")
        if part.get("type") not in _TEXTS or not isinstance(text, str):
            raise ValueError(f"content: a part must be a text, one is {shown_value(part)}")
        texts.append(text)
    return "".join(texts)


def turns_of(items: Iterable[Item]) -> list[Turn]:
    """The conversation of these items: reasoning, text and calls of one turn stand together."""
    turns: list[dict[str, Any]] = []
    for item in items:
        if item.type == "function_call_output":
            result = {"role": "tool", "content": _text(item.output), "tool_call_id": item.call_id}
            turns.append(result)
        elif item.type == "message" and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            turns.append({"role": role, "content": _text(item.content)})
        else:
            _add_to_answer(turns, item)
    return [turn for turn in turns if turn.keys() & {"content", "tool_calls"}]


def _add_to_answer(turns: list[dict[str, Any]], item: Item) -> None:
    """To the assistant's turn that the item belongs to, or to a new one."""
    last = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
    if last is None or (item.type == "message" and last.keys() & {"content", "tool_calls"}):
        turns.append(last := {"role": "assistant"})
    match item.type:
        case "reasoning":
            said = _text(item.content) or _text(item.summary)
            last |= dict.fromkeys(REASONING_NAMES, said) if said else {}
        case "function_call":
            last.setdefault("content", "")
            function = CalledFunction(name=item.name, arguments=item.arguments)
            call = CallTurn(function=function, id=item.call_id).for_template
            last["tool_calls"] = [*last.get("tool_calls", ()), call]
        case _:
            last["content"] = _text(item.content)


class ResponseTool(Known, Function):
    place: ClassVar = "responses.tools."
    type: Literal["function"]
    strict: bool = False

    @property
    def as_function(self) -> Tool:
        given = self.model_dump(exclude_unset=True, exclude={"type"})
        return Tool(type="function", function=Function(**given))


class NamedResponseTool(Strict):
    type: Literal["function"]
    name: str


class AllowedResponseTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedResponseTool]


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool = True

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema: with the type json_schema, and only with it")
        return self

    @property
    def structure(self) -> Structure | None:
        if self.type == "text":
            return None
        schema = self.schema_ or {"type": "object"}
        return Structure("json_schema", (json.dumps(schema),), "text")


class TextOptions(Known):
    place: ClassVar = "responses.text."
    format: TextFormat | None = None


class Reasoning(Known):
    place: ClassVar = "responses.reasoning."
    effort: str | None = None


class ResponsesRequest(GenerationRequest, BaseModel):
    place: ClassVar = "responses."
    logprobs_field: ClassVar = "top_logprobs"
    input: str | list[Item]
    instructions: str = ""
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] = []
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: list[ResponseTool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | AllowedResponseTools = (
        "auto"
    )
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    thinking_token_budget: int | None = None
    chat_template_kwargs: dict[str, Any] = {}
    enable_response_messages: bool = False
    metadata: dict[str, Any] = {}

    @model_validator(mode="after")
    def _what_responses_need(self) -> Self:
        if self.n != 1:
            raise ValueError("n: a response is one answer")
        if self.background and not self.store:
            raise ValueError("background: background can only be used when `store` is true")
        if not (self.previous_response_id or "resp_").startswith("resp_"):
            raise ValueError("previous_response_id: must begin with 'resp_'")
        if self.background and self.stream:
            raise ValueError("background: not with stream")
        if self.text is not None and self.text.format is not None and self.response_format:
            raise ValueError("text: response_format is given as well")
        return self

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if _LOGPROBS in self.include else None

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_output_tokens is not None:
            return "max_output_tokens", self.max_output_tokens
        return super().limit

    @property
    def structure(self) -> Structure | None:
        asked = None if self.text is None or self.text.format is None else self.text.format
        return super().structure if asked is None else asked.structure

    @property
    def tool_use(self) -> ToolUse | None:
        tools = [tool.as_function for tool in self.tools]
        choice: AnyToolChoice
        match self.tool_choice:
            case NamedResponseTool(name=name):
                choice = _named(name)
            case AllowedResponseTools(mode=mode, tools=allowed):
                named = [_named(tool.name) for tool in allowed]
                choice = AllowedToolsChoice(
                    type="allowed_tools", allowed_tools=AllowedTools(mode=mode, tools=named)
                )
            case mode:
                choice = mode
        return tool_use_of(tools, choice, self.parallel_tool_calls)

    @property
    def turns(self) -> list[Turn]:
        """Of the input."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return turns_of(self.input)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (self.prompt_behind(()),)

    def prompt_behind(self, before: Sequence[Turn]) -> ChatPrompt:
        """`before`: the conversation so far."""
        told = [{"role": "system", "content": self.instructions}] if self.instructions else []
        effort = None if self.reasoning is None else self.reasoning.effort
        options = template_options(effort) | self.chat_template_kwargs
        return ChatPrompt.of([*told, *before, *self.turns], self.tool_use, options)

    def to_call(self, caller: Caller, request_id: str, before: Sequence[Turn] = ()) -> GenerateCall:
        budget = self.thinking_token_budget
        return replace(
            super().to_call(caller, request_id),
            prompts=(self.prompt_behind(before),),
            include_reasoning=self.include_reasoning,
            thinking_token_budget=None if budget == -1 else budget,
        )


def _named(name: str) -> NamedTool:
    return NamedTool(type="function", function=FunctionName(name=name))


def items_of(given: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Items that a response has put out. Raises InvalidRequest."""
    try:
        names = Item.model_fields.keys()
        kept = [{key: item[key] for key in item.keys() & names} for item in given]
        return [Item.model_validate(item) for item in kept]
    except ValueError as error:
        raise InvalidRequest("input", str(error)) from None
