"""Tool calls: the functions that a request offers, and how a target writes calls.

A chat template writes calls in the format that the target was trained to write them in:
- hermes: `<tool_call>`, a JSON object with `name` and `arguments`, `</tool_call>`, among text;
- llama: an answer that is nothing but JSON objects with `name` and `parameters`, `; ` between them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from cluster.error_messages import Strict, shown_value
from cluster.frontend.json_codec import parsed_json
from cluster.frontend.structure import Structure
from scheduler.errors import InvalidRequest

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
"""Around a call of hermes."""
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ToolFormat(StrEnum):
    """Each is read by `ToolReader`, and bound by `ToolUse.structure`."""

    HERMES = "hermes"
    LLAMA = "llama"


class Function(Strict, BaseModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
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

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> ToolUse | None:
        """None where the target is to know of no tool. Raises InvalidRequest."""
        if not tools and choice not in ("none", "auto"):
            raise InvalidRequest("tool_choice", "no tools are given")
        return cls(tools, choice, parallel) if tools and choice != "none" else None

    @property
    def for_template(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools)

    def structure(self, form: ToolFormat | None, asked: Structure | None) -> Structure | None:
        """What binds an answer: the tools, or else what the call has `asked` for itself. Raises
        InvalidRequest where both would."""
        if form is None:
            reason = "the target's chat template has none, or a form of calls that is not known"
            raise InvalidRequest("tools", reason)
        calls = _tool_structure(self, form)
        if calls is not None and asked is not None:
            raise InvalidRequest(asked.kind, "not with tools that bind the text")
        return calls or asked


def _tool_structure(use: ToolUse, form: ToolFormat) -> Structure | None:
    """What binds an answer to these tools: calls alone where one is required, text and calls where
    some tool is strict; else nothing does. Raises InvalidRequest for a name that is not offered."""
    offered = [tool.function for tool in use.tools]
    choice, parallel = use.choice, use.parallel
    if isinstance(choice, NamedTool):
        offered = [function for function in offered if function.name == choice.function.name]
        if not offered:
            name = choice.function.name
            raise InvalidRequest("tool_choice", f"{name!r} is not among the tools")
        parallel = False
    elif choice != "required" and not any(function.strict for function in offered):
        return None
    free = choice == "auto"
    hermes = form is ToolFormat.HERMES
    more = "\\n" if hermes else "; "
    several = f'call ("{more}" call)*' if parallel else "call"
    rules = [" | ".join(f"c{number}" for number in range(len(offered)))]
    if hermes and free:
        repeat = "*" if parallel else "?"
        head = [
            f'start: (lead one "\\n{CALL_END}"){repeat} REST',
            f"lead[lazy]: /(?s:.*){CALL_BEGIN}\\n/",
            f"REST: /(?s:.*)/ & ~/(?s:.*){CALL_BEGIN}(?s:.*)/",
        ]
    elif hermes:
        head = [f"start: {several}", f'call: "{CALL_BEGIN}\\n" one "\\n{CALL_END}"']
    else:
        head = [f"start: {several}" + (" | TEXT" if free else ""), "call: one"]
        if free:
            head.append("TEXT: /([^{](?s:.*))?/")
    head.append("one: " + rules[0])
    key = "arguments" if hermes else "parameters"
    for number, function in enumerate(offered):
        bound = function.strict or not free
        schema = (function.schema_of_arguments if bound else {"type": "object"}) | {
            "x-guidance": _COMPACT
        }
        begin = json.dumps('{"name": ' + json.dumps(function.name) + f', "{key}": ')
        head.append(f'c{number}: {begin} a{number} "}}"')
        head.append(f"a{number}: %json {json.dumps(schema)}")
    return Structure("grammar", ("\n".join(head),), "tools")
