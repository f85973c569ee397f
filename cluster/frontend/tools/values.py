"""Arguments that are not written as JSON, made JSON: texts between tags, and calls of Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from cluster.frontend.text import tail_of
from cluster.frontend.tools.formats import ToolFormat, pattern_of

_CONSTANTS = {"true": True, "false": False, "null": None}


class Tags:
    """The arguments of one call, as they come: a JSON object."""

    def __init__(self, form: ToolFormat, schema: Mapping[str, Any]) -> None:
        """`schema`: of the arguments."""
        properties = schema.get("properties")
        self._types = properties if isinstance(properties, Mapping) else {}
        before, behind = (re.escape(part.strip()) for part in form.key)
        opens = pattern_of(form.value[0].strip())
        # One line break belongs to the tags, all else to the value.
        self._key = re.compile(rf"\s*{before}(.*?){behind}" + (rf"\s*{opens}" if opens else "\n?"))
        self._value_end = form.value[1].strip()
        self._breaks = form.value[1].startswith("\n")
        self._call_end = form.suffix.split()[0]
        self._count = 0
        self._text_open = False
        """Whether a value that is a text was begun."""
        self._name: str | None = None
        """Of the argument whose value comes."""

    def push(self, held: str, ended: bool) -> tuple[str, str, bool]:
        """What this adds to the object, the text that is left, and whether the call has ended."""
        said = ""
        while True:
            if self._name is None:
                if held.lstrip().startswith(self._call_end):
                    return said + ("}" if self._count else "{}"), held.lstrip(), True
                if (key := self._key.match(held)) is None or (key.end() == len(held) and not ended):
                    return said, held, False
                self._name, held = key[1], held[key.end() :]
                said += (", " if self._count else "{") + json.dumps(self._name) + ": "
                self._count += 1
            piece, held, whole = self._value(held)
            said += piece
            if not whole:
                return said, held, False
            self._name, self._text_open = None, False

    def _value(self, held: str) -> tuple[str, str, bool]:
        """What is known of a value, what is left, and whether it is whole."""
        text, schema = self._is_text(), self._types.get(self._name or "")
        at = held.find(self._value_end)
        if at < 0 and not text:
            return "", held, False
        end = at if at >= 0 else len(held) - tail_of(held, (self._value_end,))
        value = held[:end]
        if self._breaks:
            value = value.removesuffix("\n")
        left = held[len(value) :] if at < 0 else held[at + len(self._value_end) :]
        if not text:
            return _as_json(value, schema), left, True
        begin = "" if self._text_open else '"'
        self._text_open = True
        return begin + json.dumps(value, ensure_ascii=False)[1:-1] + '"' * (at >= 0), left, at >= 0

    def _is_text(self) -> bool:
        """Whether the value is a text, whatever it looks like."""
        return _types(self._types.get(self._name or "")) <= {"string"}


def _types(schema: Any) -> set[str]:
    """Those that a schema names; none where it names none that are plain to see."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    found = set(named if isinstance(named, list) else [named] if isinstance(named, str) else ())
    for several in ("anyOf", "oneOf"):
        for inner in schema.get(several) or ():
            found |= _types(inner) or {"object"}
    if not found and ("$ref" in schema or "allOf" in schema):
        return {"object"}
    return found


def _as_json(text: str, schema: Any) -> str:
    """A value that need not be a text: as it stands where it is JSON, else as Python reads it."""
    text = text.strip()
    try:
        json.loads(text)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def python_end(text: str) -> int | None:
    """The length of a text up to where its first bracket closes; None: it does not."""
    depth, quote, escaped = 0, "", False
    for at, char in enumerate(text):
        if escaped:
            escaped = False
        elif quote:
            escaped = char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth <= 0:
                return at + 1
    return None


def python_calls(text: str) -> list[tuple[str, str]]:
    """Names and arguments, as JSON, of a list of calls; empty where it is none."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        return [_python_call(call) for call in tree.elts]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return []


def _python_call(call: ast.expr) -> tuple[str, str]:
    """Raises ValueError for what is no call with arguments by name."""
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call")
    given = {}
    for argument in call.keywords:
        if argument.arg is None:
            raise ValueError("no name of an argument")
        given[argument.arg] = ast.literal_eval(_Constants().visit(argument.value))
    name = ast.unparse(call.func)
    return name, json.dumps(given, ensure_ascii=False, allow_nan=False)


class _Constants(ast.NodeTransformer):
    """Constants as JSON names them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:  # ast's name
        if node.id not in _CONSTANTS:
            raise ValueError("no constant")
        return ast.Constant(_CONSTANTS[node.id])
