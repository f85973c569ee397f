"""Reads the calls of tools out of an answer's text while it is written.

A call begins when its name is known and its arguments have begun. From there on its arguments are
given out as they come, in the target's own words, also where they turn out to be no JSON. What ends
before that point and is no call is content, as it stands. So is an object whose arguments are not
plain to see: without any but with other fields, with two that differ, or with what is no object.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from cluster.frontend.text import tail_of
from cluster.frontend.tools.use import CALL_BEGIN, CALL_END, ToolFormat

_ANY_NAME = r"[a-zA-Z0-9_.-]{1,64}"
_KEYS = ("arguments", "parameters")
"""A call has its arguments by either name, whatever its format writes."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object; its beginning where the answer ends within it."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What comes next of one call."""

    index: int
    """Of the call, within its answer."""
    name: str = ""
    """In the first delta only, which has no arguments."""
    id: str = ""
    """Comes with the name."""
    arguments: str = ""
    """The next characters of them."""
    whole: ToolCall | None = None
    """The call, in its last delta."""


class ToolReader:
    """Parts the text of one answer, as it comes, into content and calls.

    What was given out is a function of the text so far, never of how it was cut. White space beside
    a call is dropped.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str], parallel: bool = True) -> None:
        """`parallel`: whether calls behind the first one are given out."""
        self._parallel = parallel
        self._hermes = form is ToolFormat.HERMES
        # Of llama, an object at the beginning alone.
        self._lead = re.compile((CALL_BEGIN if self._hermes else r"\A") + r"\s*(?=\{)")
        # Only an object with one of these names is a call.
        name = _ANY_NAME if self._hermes else "|".join(map(re.escape, names))
        self._name = re.compile(name)
        # Where the first arguments are empty, others may follow.
        self._head = re.compile(
            rf'\{{\s*"name"\s*:\s*"({name})"\s*,\s*"(?:{"|".join(_KEYS)})"\s*:\s*(?=\{{\s*[^\s}}])'
        )
        self._held = ""
        """Text that was not read yet."""
        self._ended = False
        self._content = ""
        self._deltas: list[CallDelta] = []
        self._begun = 0
        """Calls that have begun."""
        self._reading = self._read()

    def push(self, text: str, ended: bool = False) -> tuple[str, list[CallDelta]]:
        """The content and the parts of calls that this adds; `ended`: nothing comes any more."""
        self._held += text
        self._ended = ended
        next(self._reading)
        content, deltas = self._content, self._deltas
        self._content, self._deltas = "", []
        return content, [delta for delta in deltas if self._parallel or not delta.index]

    # Each yield below waits for more text, or for the end.

    def _read(self) -> Iterator[None]:
        while (lead := (yield from self._up_to_object())) is not None:
            if (yield from self._object(lead)):
                yield from self._past_call()
            elif not self._hermes:
                break
        while True:
            self._say(len(self._held))
            yield

    def _up_to_object(self) -> Generator[None, None, str | None]:
        """Reads the content before an object that may be a call. Returns what stands between them;
        None where no call can come any more."""
        while (lead := self._lead.search(self._held)) is None:
            bare = self._held.rstrip()
            if self._ended or (bare and not self._hermes):
                return None
            self._say(len(bare[: len(bare) - tail_of(bare, (CALL_BEGIN + "{",))].rstrip()))
            yield
        content = self._held[: lead.start()].rstrip()
        between = self._held[len(content) : lead.end()]
        self._say(len(content))
        self._held = self._held[len(between) :]
        return between

    def _object(self, lead: str) -> Generator[None, None, bool]:
        """Whether it is a call; else it is content, and so is the `lead` before it."""
        scan, text = _Scan(), ""
        while True:
            new, self._held = self._held, ""
            text += new
            if head := self._head.match(text):
                self._held = text[head.end() :]
                yield from self._arguments(head[1])
                return True
            size = scan.end(new, depth=0)
            if size is not None or self._ended:
                break
            yield
        if size is not None:
            text, self._held = text[: len(text) - len(new) + size], new[size:]
        found = _call_of(text)
        if found is None or not self._name.fullmatch(found[0]):
            self._content += lead + text
            return False
        name, arguments = found
        self._end(self._begin(name), arguments, arguments)
        return True

    def _arguments(self, name: str) -> Iterator[None]:
        """Those of a call, as they come, and what else is in its object."""
        call, scan, arguments = self._begin(name), _Scan(depth=1), ""
        while True:
            size = scan.end(self._held, depth=1)
            piece = self._held[:size]
            self._held = self._held[len(piece) :]
            arguments += piece
            if size is not None or self._ended:
                break
            if piece:
                self._deltas.append(CallDelta(self._begun - 1, arguments=piece))
            yield
        self._end(call, piece, arguments)
        while (size := scan.end(self._held, depth=0)) is None:
            self._held = ""
            if self._ended:
                return
            yield
        self._held = self._held[size:]

    def _past_call(self) -> Iterator[None]:
        """Drops what belongs to it, up to what comes next."""
        tag_due = self._hermes
        while True:
            self._held = self._held.lstrip(None if self._hermes else "; \n")
            if tag_due and (self._ended or not CALL_END.startswith(self._held)):
                tag_due = False
                self._held = self._held.removeprefix(CALL_END).lstrip()
            if self._ended or (self._held and not tag_due):
                return
            yield

    def _say(self, size: int) -> None:
        """So many characters of the held text are content."""
        self._content += self._held[:size]
        self._held = self._held[size:]

    def _begin(self, name: str) -> ToolCall:
        call = ToolCall(name, "")
        self._deltas.append(CallDelta(self._begun, call.name, call.id))
        self._begun += 1
        return call

    def _end(self, call: ToolCall, piece: str, arguments: str) -> None:
        """`piece`: the last of its arguments."""
        whole = ToolCall(call.name, arguments, call.id)
        self._deltas.append(CallDelta(self._begun - 1, arguments=piece, whole=whole))


@dataclass(slots=True)
class _Scan:
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


def _call_of(text: str) -> tuple[str, str] | None:
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
