"""Tool calls: the functions that a request offers, and how the target may use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from cluster.error_messages import Strict, shown_value
from cluster.frontend.json_codec import parsed_json
from scheduler.errors import InvalidRequest

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Strict, BaseModel):
    name: ToolName
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "additionalProperties": False}


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def json_object(text: str) -> dict[str, Any]:
    """Of a text, which may be empty. Raises ValueError."""
    try:
        found = parsed_json(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"must be the text of a JSON object, is {shown_value(text)}")
    return found


class CalledFunction(Strict):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, text: str) -> str:
        json_object(text)
        return text


class CallTurn(Strict):
    """A call in a turn of the assistant."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None

    @property
    def for_template(self) -> dict[str, Any]:
        arguments = json_object(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that a call offers, and how the target may use them."""

    tools: Sequence[Tool]
    choice: ToolChoice = "auto"
    parallel: bool = True
    """Whether an answer may have several calls."""
    allowed: frozenset[str] | None = None
    """Names of those that an answer may call; None: of all."""

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool],
        choice: ToolChoice,
        parallel: bool,
        allowed: frozenset[str] | None = None,
    ) -> ToolUse | None:
        """None where the target is to know of no tool. Raises InvalidRequest."""
        if not tools and choice not in ("none", "auto"):
            raise InvalidRequest("tool_choice", "no tools are given")
        return cls(tools, choice, parallel, allowed) if tools and choice != "none" else None

    @property
    def for_template(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools)

    @property
    def offered(self) -> list[Function]:
        """Those that an answer may call. Raises InvalidRequest for a choice that is no tool."""
        functions = [tool.function for tool in self.tools]
        if self.allowed is not None:
            functions = [function for function in functions if function.name in self.allowed]
        if not isinstance(self.choice, NamedTool):
            return functions
        name = self.choice.function.name
        if name not in self.names:
            raise InvalidRequest("tool_choice", f"{name!r} is not among the tools")
        return [function for function in functions if function.name == name]

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of arguments, by name."""
        return {tool.function.name: tool.function.schema_of_arguments for tool in self.tools}

    @property
    def forced(self) -> bool:
        """Whether an answer must be calls alone."""
        return self.choice != "auto"

    @property
    def binds(self) -> bool:
        """Whether tools say what an answer may be."""
        strict = any(tool.function.strict for tool in self.tools)
        return self.forced or strict or self.allowed is not None

    @property
    def may_repeat(self) -> bool:
        """Whether an answer may have several calls."""
        return self.parallel and not isinstance(self.choice, NamedTool)
