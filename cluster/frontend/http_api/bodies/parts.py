"""Objects within bodies: the form of an answer, tools, and turns of a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from cluster.error_messages import Strict, shown_value
from cluster.frontend.http_api.bodies.check import Known
from cluster.frontend.http_api.bodies.structural_tags import grammar_of_tags
from cluster.frontend.prompts import REASONING_NAMES, ChatPrompt
from cluster.frontend.structure import Structure
from cluster.frontend.tools import (
    CalledFunction,
    CallTurn,
    Function,
    NamedTool,
    Tool,
    ToolChoice,
    ToolUse,
    json_object,
)
from scheduler.errors import InvalidRequest


class StreamOptions(Known):
    place: ClassVar = "stream_options."
    open_to_unknown: ClassVar = False
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Known):
    place: ClassVar = "response_format."
    open_to_unknown: ClassVar = False
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fields_of_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: with the type json_schema, and only with it")
        if self.type == "structural_tag":
            grammar_of_tags(self.model_dump())
        return self

    @property
    def structure(self) -> Structure | None:
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            return Structure("grammar", (grammar_of_tags(self.model_dump()),))
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return Structure("json_schema", (json.dumps(schema),))


class StructuredOutputs(Known):
    """As vLLM names them."""

    place: ClassVar = "structured_outputs."
    open_to_unknown: ClassVar = False
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        names = ("json_", "regex", "choice", "grammar", "structural_tag")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) + bool(self.json_object) != 1:
            raise ValueError(
                "exactly one of json, json_object, regex, choice, grammar and structural_tag must"
                " be given"
            )
        _ = self.structure
        return self

    @property
    def structure(self) -> Structure:
        if self.json_ is not None:
            schema = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return Structure("json_schema", (schema,))
        if self.choice is not None:
            return Structure("choice", tuple(self.choice))
        if self.regex is not None:
            return Structure("regex", (self.regex,))
        if self.grammar is not None:
            return Structure("grammar", (self.grammar,))
        if self.structural_tag is None:
            return Structure("json_schema", ('{"type": "object"}',))
        tags = self.structural_tag
        given = json_object(tags) if isinstance(tags, str) else tags
        return Structure("grammar", (grammar_of_tags(given),))


class FunctionPart(Known, Function):
    place: ClassVar = "tools.function."


class ToolPart(Known, Tool):
    place: ClassVar = "tools."
    function: FunctionPart


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsChoice(Strict):
    """Some of the tools: the prompt tells of all, so that its prefix stays the same."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


AnyToolChoice = ToolChoice | AllowedToolsChoice


def tool_use_of(tools: Sequence[Tool], choice: AnyToolChoice, parallel: bool) -> ToolUse | None:
    """None where the target is to know of no tool. Raises InvalidRequest."""
    if not isinstance(choice, AllowedToolsChoice):
        return ToolUse.of(tools, choice, parallel)
    names = [tool.function.name for tool in choice.allowed_tools.tools]
    if missing := set(names) - {tool.function.name for tool in tools}:
        raise InvalidRequest("tool_choice", f"{min(missing)!r} is not among the tools")
    return ToolUse.of(tools, choice.allowed_tools.mode, parallel, frozenset(names))


class CalledFunctionPart(Known, CalledFunction):
    place: ClassVar = "messages.tool_calls.function."


class CallPart(Known, CallTurn):
    place: ClassVar = "messages.tool_calls."
    function: CalledFunctionPart


class TextPart(Known):
    place: ClassVar = "messages.content."
    type: Literal["text", "input_text", "output_text"]
    text: str


_CONTENT = {
    "anyOf": [
        {"type": ["string", "null"]},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}
"""As the OpenAPI document says it."""


class Message(Known):
    place: ClassVar = "messages."
    role: str
    name: str | None = None
    tool_calls: list[CallPart] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunctionPart | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    content: Annotated[str | None, WithJsonSchema(_CONTENT)] = Field(
        default=None, validate_default=True
    )

    @field_validator("content", mode="before")
    @classmethod
    def _text_of_parts(cls, content: Any, info: ValidationInfo) -> str:
        if isinstance(content, str):
            return content
        # Calls that are wrong are not among the data, and are complained of by themselves.
        if content is None and (
            info.data.get("role") == "assistant" or info.data.get("tool_calls", True)
        ):
            return ""
        if isinstance(content, list):
            try:
                parts = [TextPart.model_validate(part, context=info.context) for part in content]
                return "".join(part.text for part in parts)
            except ValidationError:
                pass
        said = shown_value(content)
        raise ValueError(f"must be a text or a list of parts of type text, is {said}")

    @property
    def for_template(self) -> dict[str, Any]:
        said = self.model_dump(include={"role", "content", "name", "tool_call_id"})
        if self.role == "function":  # as the result of a call was named once
            said["role"] = "tool"
        if self.tool_calls:
            said["tool_calls"] = [call.for_template for call in self.tool_calls]
        elif self.function_call is not None:
            said["tool_calls"] = [CallTurn(function=self.function_call).for_template]
        if reasoning := self.reasoning or self.reasoning_content:
            said |= dict.fromkeys(REASONING_NAMES, reasoning)
        return {name: value for name, value in said.items() if value is not None}


class TemplateOptions(Known, BaseModel):  # the linter looks no further than its bases
    """What a body may tell the chat template beside the turns."""

    tools: list[ToolPart] = []
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] = []

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: not with add_generation_prompt")
        return self

    def chat_prompt(
        self,
        turns: Sequence[Message],
        tools: ToolUse | None,
        options: Mapping[str, Any],
        **others: Any,
    ) -> ChatPrompt:
        return ChatPrompt.of(
            [turn.for_template for turn in turns],
            tools,
            options,
            documents=self.documents,
            asks=self.add_generation_prompt is not False and not self.continue_final_message,
            goes_on=self.continue_final_message,
            template=self.chat_template,
            **others,
        )
