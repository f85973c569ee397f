"""Which format a chat template teaches: the one whose reader reads a rendered call back.

The template renders a conversation with a call that is known. Only if some format's reader finds
that call, its name and its arguments whole, in what the template wrote, the format is known.
"""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import takewhile
from typing import Any

from cluster.frontend.bounded import rendered
from cluster.frontend.tools.formats import AUTO, ToolFormat, formats_named
from cluster.frontend.tools.reader import ToolReader

_NAME = "look_up_weather"
_ARGUMENTS = {"city": 'K\u00f6ln "S\u00fcd"', "days": 2, "also": {"wind": True, "places": ["a\nb"]}}
_ID = "probecall"
"""Some templates take no other length."""
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "days": {"type": "integer", "description": "How many."},
                "also": {"type": "object", "description": "What else."},
            },
            "required": ["city"],
        },
    },
}
_ASKED = {"role": "user", "content": "How is the weather?"}
_CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    ],
}
_RESULT = {"role": "tool", "content": "rain", "tool_call_id": _ID, "name": _NAME}
_CONVERSATIONS: tuple[list[dict[str, Any]], ...] = ([_ASKED, _CALLED], [_ASKED, _CALLED, _RESULT])
"""Some templates refuse a call without its result."""


@lru_cache(maxsize=16)
def tool_format(name: str, template: str | None) -> ToolFormat | None:
    """The format of the calls that a chat template writes, among those that `name` may mean, which
    with `auto` are all; None: it tells of no tools, or it writes calls in a format that is not
    known. The template renders once, and then never again."""
    forms = formats_named(name)
    otherwise = None if name == AUTO else forms[0]
    if template is None or len(forms) == 1:
        return otherwise
    asked = [([_ASKED], True), *((turns, False) for turns in _CONVERSATIONS)]
    before, *whole = rendered(template, [_TOOL], asked)
    for text in whole:
        written = _call_written(before or "", text or "")
        for form in forms:
            if _reads_back(form, written):
                return form
    return otherwise


def _call_written(before: str, whole: str) -> str:
    """What a template writes for the assistant's turn and those behind it: the whole text without
    the one up to that turn. Empty where it has no place for tools."""
    if _NAME not in before:
        return ""
    if whole.startswith(before):
        return whole[len(before) :]
    # A prompt may end with a line that no earlier turn has, such as the begin of a thought.
    lines = zip(before.splitlines(keepends=True), whole.splitlines(keepends=True), strict=False)
    same = takewhile(lambda pair: pair[0] == pair[1], lines)
    return whole[sum(len(line) for line, _ in same) :]


def _reads_back(form: ToolFormat, written: str) -> bool:
    """Whether the known call is the one that the format's reader finds."""
    reader = ToolReader(form, {_NAME: _TOOL["function"]["parameters"]})
    _content, deltas = reader.push(written, ended=True)
    whole = [delta.whole for delta in deltas if delta.whole is not None]
    if len(whole) != 1 or whole[0].name != _NAME:
        return False
    try:
        return bool(json.loads(whole[0].arguments) == _ARGUMENTS)
    except ValueError:
        return False
