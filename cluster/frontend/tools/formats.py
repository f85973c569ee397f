"""How targets write calls of tools: one table, from which calls are read and bound."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The text of a run of calls: `begin`, calls with `between` between them, `end`. A call:
    `prefix`, its name, `infix`, its arguments, `suffix`."""

    name: str
    arguments: Literal["object", "head", "tags", "python"]
    """What is read: a JSON object that has name and arguments; a name, and a JSON object of
    arguments alone; each argument between tags, texts as they are; a list of Python's calls."""
    prefix: str
    infix: str
    suffix: str
    marker: str = ""
    """What calls begin with among text. Without one an answer is either calls or text."""
    begin: str = ""
    between: str = ""
    end: str = ""
    key: tuple[str, str] = ("", "")
    """Of tags: what stands around the name of an argument."""
    value: tuple[str, str] = ("", "")
    """And around its value."""
    id: str = ""
    """What the id of a call must be, where the chat template writes it."""

    @property
    def opening(self) -> str:
        """What the first call of a run begins with, up to its name."""
        return self.begin + self.prefix

    @property
    def markers(self) -> tuple[str, ...]:
        """All that a reader must see of the text, special tokens included."""
        return (self.begin, self.prefix, self.infix, self.suffix, self.between, self.end)


def pattern_of(literal: str) -> str:
    """The regular expression of a literal, with any white space and any number in the places of
    its own."""
    parts = re.split(r"(\s+|\d+)", literal)
    return "".join(
        r"\s*" if part.isspace() else r"\d+" if part.isdigit() else re.escape(part)
        for part in parts
        if part
    )


_OBJECT = ('{"name": "', '", "arguments": ', "}")


def _deepseek(name: str) -> str:
    """A token of DeepSeek's, which have wide bars and low blocks for spaces."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


_CALLS, _CALL, _CALL_END = map(_deepseek, ("tool calls begin", "tool call begin", "tool call end"))
_FORMATS = (
    ToolFormat(
        "hermes",
        "object",
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        "}\n</tool_call>",
        marker="<tool_call>",
        between="\n",
    ),
    ToolFormat(
        "qwen3_coder",
        "tags",
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        marker="<tool_call>",
        between="\n",
        key=("<parameter=", ">\n"),
        value=("", "\n</parameter>\n"),
    ),
    ToolFormat(
        "glm45",
        "tags",
        "<tool_call>",
        "\n",
        "</tool_call>",
        marker="<tool_call>",
        between="\n",
        key=("<arg_key>", "</arg_key>\n"),
        value=("<arg_value>", "</arg_value>\n"),
    ),
    ToolFormat("mistral", "head", "[TOOL_CALLS]", "[ARGS]", "", marker="[TOOL_CALLS]"),
    ToolFormat(
        "mistral_json",
        "object",
        *_OBJECT,
        marker="[TOOL_CALLS]",
        begin="[TOOL_CALLS][",
        between=", ",
        end="]",
    ),
    ToolFormat(
        "deepseek_v3",
        "head",
        _CALL + "function" + _deepseek("tool sep"),
        "\n```json\n",
        "\n```" + _CALL_END,
        marker=_CALLS,
        begin=_CALLS,
        between="\n",
        end=_deepseek("tool calls end"),
    ),
    ToolFormat(
        "deepseek_v31",
        "head",
        _CALL,
        _deepseek("tool sep"),
        _CALL_END,
        marker=_CALLS,
        begin=_CALLS,
        end=_deepseek("tool calls end"),
    ),
    ToolFormat(
        "kimi_k2",
        "head",
        "<|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        marker="<|tool_calls_section_begin|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        id="functions.{name}:{index}",
    ),
    ToolFormat(
        "gpt_oss",
        "head",
        "<|channel|>commentary to=functions.",
        " <|constrain|>json<|message|>",
        "",  # the token behind it ends the text
        marker="<|channel|>commentary to=",
    ),
    ToolFormat("llama3_json", "object", '{"name": "', '", "parameters": ', "}", between="; "),
    ToolFormat("pythonic", "python", "", "(", ")", begin="[", between=", ", end="]"),
    ToolFormat("glm4", "head", "", "\n", "", between="\n"),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in _FORMATS}
"""By their names. Those with a marker stand first: `auto` takes the first that reads a call back.
"""
_OTHER_NAMES = {
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "openai": "gpt_oss",
}
AUTO = "auto"
PARSERS = (AUTO, *TOOL_FORMATS, *_OTHER_NAMES)


def formats_named(name: str) -> list[ToolFormat]:
    """Those that a name may mean: a family has several."""
    name = "" if name == AUTO else _OTHER_NAMES.get(name, name)
    return [form for known, form in TOOL_FORMATS.items() if known.startswith(name)]
