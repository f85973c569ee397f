"""JSON objects within a text that is still written: where they end, and which of them are calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

_KEYS = ("arguments", "parameters")
"""A call has its arguments by either name, whatever its format writes."""
HEAD = re.compile(
    r'\{\s*"name"\s*:\s*"([a-zA-Z0-9_.-]{1,64})"\s*,\s*'
    rf'"(?:{"|".join(_KEYS)})"\s*:\s*(?=\{{\s*[^\s}}])'
)
"""Up to arguments that are not empty: where the first ones are, others may follow."""


@dataclass(slots=True)
class Scan:
    """Looks for the end of a JSON object that comes in pieces."""

    depth: int = 0
    """Of the objects around the next character."""
    _quoted: bool = False
    _escaped: bool = False

    def end(self, text: str, depth: int) -> int | None:
        """The length of the text up to the brace that goes back to this depth; None: it is not
        there. An object that is broken off ends before the tag or the semicolon behind it.
        """
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = char == "\\"
                self._quoted = char != '"'
            elif char in "<;":
                self.depth = depth
                return at
            else:
                self._quoted = char == '"'
                self.depth += (char == "{") - (char == "}")
                if char == "}" and self.depth == depth:
                    return at + 1
        return None


def call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments, as they stand there, of an object that is a call. It may lack the brace
    at its end behind its arguments."""
    try:
        fields, closed = _fields(text)
        name = fields.pop("name", ("", None))[1]
        given = [fields.pop(key) for key in _KEYS if key in fields]
        given = [(said, value) for said, value in given if value is not None]
        if not isinstance(name, str) or any(value != given[0][1] for _, value in given):
            return None
    except (ValueError, RecursionError):
        return None
    if given:
        said, value = given[0]
        return (name, said) if isinstance(value, dict) else None
    # There are no arguments, or some by a name that is not known.
    return (name, "{}") if closed and not fields.keys() - {"type", "id"} else None


def _fields(text: str) -> tuple[dict[str, tuple[str, Any]], bool]:
    """Of an object, each once: its value as it stands there, and what it is; and whether the brace
    at its end is there. Raises ValueError and RecursionError."""
    found: dict[str, tuple[str, Any]] = {}
    mark, at = _mark(text, 0)
    if mark != "{":
        raise ValueError("no object")
    mark = ","
    while mark == ",":
        name, at = _JSON.raw_decode(text, at)
        colon, begin = _mark(text, at)
        if not isinstance(name, str) or name in found or colon != ":":
            raise ValueError(f"not a field, or one more of the same name: {name!r}")
        value, at = _JSON.raw_decode(text, begin)
        found[name] = text[begin:at], value
        mark, at = _mark(text, at)
    if at < len(text) or mark not in ("", "}"):
        raise ValueError("no end of an object")
    return found, mark == "}"


def _mark(text: str, at: int) -> tuple[str, int]:
    """The mark between two values, if one stands there, and where the text goes on."""
    found = _MARK.match(text, at)
    assert found is not None, "it matches nothing, too"
    return found[1], found.end()


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_MARK = re.compile(r"\s*([{:,}]?)\s*")
_JSON = json.JSONDecoder(parse_constant=_no_number)
