"""Objects within requests of OpenAI's API: the form of an answer, and turns of a conversation."""

from __future__ import annotations

import json
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from cluster.error_messages import Strict, shown_value
from cluster.frontend.structure import Structure
from cluster.frontend.tools import CallTurn

_OWN_NULLS = {"parameters", "schema", "json", "chat_template_kwargs", "logit_bias"}
"""Objects whose names are the client's own: there a null is a value."""


def without_nulls(value: Any) -> Any:
    """Clients send fields that they leave unset as null, and turns back with all their fields."""
    if isinstance(value, list):
        return [without_nulls(item) if isinstance(item, dict | list) else item for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: inner if name in _OWN_NULLS else without_nulls(inner)
        for name, inner in value.items()
        if inner is not None
    }


class StreamOptions(Strict):
    include_usage: bool = False


class JsonSchema(Strict):
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: with the type json_schema, and only with it")
        return self

    @property
    def structure(self) -> Structure | None:
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return Structure("json_schema", (json.dumps(schema),))


class StructuredOutputs(Strict):
    """As vLLM names them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = (self.json_, self.regex, self.choice, self.grammar)
        if sum(structure is not None for structure in given) != 1:
            raise ValueError("exactly one of json, regex, choice and grammar must be given")
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
        return Structure("grammar", (self.grammar or "",))


class Message(Strict):
    role: str
    name: str | None = None
    tool_calls: list[CallTurn] | None = None
    tool_call_id: str | None = None
    content: str | None = Field(default=None, validate_default=True)

    @field_validator("content", mode="before")
    @classmethod
    def _text_of_parts(cls, content: Any, info: ValidationInfo) -> str:
        # Calls that are wrong are not among the data, and are complained of by themselves.
        if content is None and info.data.get("tool_calls", True):
            return ""
        if isinstance(content, str):
            return content
        if isinstance(content, list) and all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            and len(part) == 2
            for part in content
        ):
            return "".join(part["text"] for part in content)
        said = shown_value(content)
        raise ValueError(f"must be a text or a list of parts of type text, is {said}")

    @property
    def for_template(self) -> dict[str, Any]:
        said = self.model_dump(include={"role", "content", "name", "tool_call_id"})
        if self.tool_calls:
            said["tool_calls"] = [call.for_template for call in self.tool_calls]
        return {name: value for name, value in said.items() if value is not None}
