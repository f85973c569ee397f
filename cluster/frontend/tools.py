"""Tool calls: the functions that a request offers, how a target writes calls, how they are read.

A chat template that knows tools says in which format the target was trained to write a call:
- hermes: `<tool_call>`, a JSON object with `name` and `arguments`, `</tool_call>`, among text;
- llama: an answer that is nothing but JSON objects with `name` and `parameters`, `; ` between them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from cluster.frontend.json_text import parsed_json
from cluster.frontend.structure import Structure
from cluster.sentences import Strict
from scheduler.errors import InvalidRequest

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ToolFormat(StrEnum):
    HERMES = "hermes"
    LLAMA = "llama"


def tool_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template teaches; None: it knows no tools, or another format."""
    if template is None or "tools" not in template:
        return None
    if _OPEN in template:
        return ToolFormat.HERMES
    return ToolFormat.LLAMA if '"parameters"' in template else None


# --------------------------------------------------------------------------- requests


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
        raise ValueError("must be the text of a JSON object")
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
            raise InvalidRequest("tools", "the target's chat template knows none")
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
        offered = [one for one in offered if one.name == choice.function.name]
        if not offered:
            name = choice.function.name
            raise InvalidRequest("tool_choice", f"{name!r} is not among the tools")
        parallel = False
    elif choice != "required" and not any(one.strict for one in offered):
        return None
    free = choice == "auto"
    hermes = form is ToolFormat.HERMES
    more = "\\n" if hermes else "; "
    several = f'call ("{more}" call)*' if parallel else "call"
    rules = [" | ".join(f"c{number}" for number in range(len(offered)))]
    if hermes and free:
        repeat = "*" if parallel else "?"
        head = [
            f'start: (lead one "\\n{_CLOSE}"){repeat} REST',
            f"lead[lazy]: /(?s:.*){_OPEN}\\n/",
            f"REST: /(?s:.*)/ & ~/(?s:.*){_OPEN}(?s:.*)/",
        ]
    elif hermes:
        head = [f"start: {several}", f'call: "{_OPEN}\\n" one "\\n{_CLOSE}"']
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
    return Structure("grammar", ("\n".join(head),))


# --------------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class ToolReader:
    """Parts the text of one answer, as it comes, into content and calls.

    What looks like a call and is none is content, as it stands. White space beside a call is
    dropped.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._held = ""
        """Text that is neither content nor a call yet."""
        self._begun = False
        """Whether content was given out."""
        self._after_call = False
        """Whether no content has come since the last call."""
        self.calls = 0
        """Calls that were found."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        return self._read(ended=False)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The text has ended."""
        return self._read(ended=True)

    def _read(self, ended: bool) -> tuple[str, list[ToolCall]]:
        read = self._hermes if self._form is ToolFormat.HERMES else self._llama
        content, calls = read(ended)
        self.calls += len(calls)
        self._begun |= bool(content)
        self._after_call = bool(calls) or (self._after_call and not content)
        return content, calls

    def _hermes(self, ended: bool) -> tuple[str, list[ToolCall]]:
        content, calls = "", list[ToolCall]()
        if self._after_call:
            self._held = self._held.lstrip()
        while (begin := self._held.find(_OPEN)) >= 0:
            end = self._held.find(_CLOSE, begin)
            if end < 0 and not ended:
                break
            body = self._held[begin + len(_OPEN) : len(self._held) if end < 0 else end]
            after = "" if end < 0 else self._held[end + len(_CLOSE) :]
            call = _call_of(body, "arguments")
            if call is None:
                content += self._held[: len(self._held) - len(after)]
            else:
                content += self._held[:begin].rstrip()
                calls.append(call)
                after = after.lstrip()
            self._held = after
        if ended:
            content, self._held = content + self._held, ""
            return content, calls
        open_at = self._held.find(_OPEN)
        length = open_at if open_at >= 0 else len(self._held) - _tail_of(self._held, _OPEN)
        free = self._held[:length].rstrip()
        self._held = self._held[len(free) :]
        return content + free, calls

    def _llama(self, ended: bool) -> tuple[str, list[ToolCall]]:
        if self._begun or (self._held.strip() and not self._held.lstrip().startswith("{")):
            content, self._held = self._held, ""
            return content, []
        if not ended:
            return "", []
        text, self._held = self._held, ""
        calls, decoder, at = [], json.JSONDecoder(), 0
        while rest := text[at:].lstrip("; \n"):
            try:
                found, length = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return text, []
            at = len(text) - len(rest) + length
            call = _of_object(found, "parameters")
            if call is None or call.name not in self._names:
                return text, []
            calls.append(call)
        return ("", calls) if calls else (text, [])


def _call_of(text: str, key: str) -> ToolCall | None:
    try:
        return _of_object(json.loads(text), key)
    except (ValueError, RecursionError):
        return None


def _of_object(found: Any, key: str) -> ToolCall | None:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get(key, {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(found["name"], json.dumps(arguments, ensure_ascii=False))


def _tail_of(text: str, tag: str) -> int:
    """Characters at the text's end that may be the beginning of the tag."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
