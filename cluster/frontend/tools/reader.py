"""Reads the calls of tools out of an answer's text while it is written.

A call begins when its name is known and its arguments have begun. From there on its arguments are
given out as they come, in the target's own words, also where they turn out to be no JSON. What ends
before that point and is no call is content, as it stands.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from cluster.frontend.text import tail_of
from cluster.frontend.tools.use import CALL_BEGIN, CALL_END, ToolFormat


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
        self._hermes = hermes = form is ToolFormat.HERMES
        self._key = "arguments" if hermes else "parameters"
        self._tag = CALL_BEGIN if hermes else ""
        self._between = None if hermes else "; \n"
        """Characters beside a call that are dropped; None: white space."""
        self._names = None if hermes else names
        """Only an object with one of these names is a call; None: with any."""
        self._head = re.compile(
            r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_.-]{1,64})"\s*,\s*'
            rf'"{self._key}"\s*:\s*(?=\{{)'
        )
        self._held = ""
        """Text that was not read yet."""
        self._object: _Object | None = None
        """The object that is being read, which is a call or may be one."""
        self._content_only = False
        """Whether no call can come any more."""
        self._after_call = False
        """Whether nothing has come since the last call."""
        self._end_tag_due = False
        """Whether the tag at that call's end may still come."""
        self._calls = 0
        """Calls that have begun."""

    def push(self, text: str, ended: bool = False) -> tuple[str, list[CallDelta]]:
        """The content and the parts of calls that this adds; `ended`: nothing comes any more."""
        self._held += text
        content, calls = "", list[CallDelta]()
        going_on = True
        while going_on:
            if self._object is None:
                said, going_on = self._outside(ended)
            elif self._object.call is None:
                said, going_on = self._undecided(self._object, calls, ended)
            else:
                said, going_on = "", self._in_call(self._object, self._object.call, calls, ended)
            content += said
        return content, [call for call in calls if self._parallel or not call.index]

    def _outside(self, ended: bool) -> tuple[str, bool]:
        """Content, and whether there is more to read."""
        if self._after_call and not self._past_the_last_call(ended):
            return "", False
        held = self._held
        begin = -1 if self._content_only else held.find(self._tag)
        if begin < 0:
            kept = 0 if ended else tail_of(held, (self._tag,))
            free = held[: len(held) - kept]
            free = free if ended or not self._tag else free.rstrip()
            self._held = held[len(free) :]
            return free, False
        after = held[begin + len(self._tag) :].lstrip()
        free = held[:begin].rstrip()
        if not after and not ended:
            self._held = held[len(free) :]
            return free, False
        if not after.startswith("{"):
            # No call begins here: without a tag, none ever.
            self._content_only = not self._tag
            self._held = after
            return held[: len(held) - len(after)], True
        self._object = _Object(lead=held[len(free) : len(held) - len(after)])
        self._held = after
        return free, True

    def _past_the_last_call(self, ended: bool) -> bool:
        """Drop what belongs to it; whether something else has come."""
        self._held = self._held.lstrip(self._between)
        if self._end_tag_due:
            if not ended and CALL_END.startswith(self._held):
                return False
            self._end_tag_due = False
            self._held = self._held.removeprefix(CALL_END).lstrip()
        self._after_call = not self._held
        return not self._after_call

    def _undecided(self, one: _Object, calls: list[CallDelta], ended: bool) -> tuple[str, bool]:
        """Of an object that may be a call: content, and whether there is more to read."""
        text = one.text + self._held
        if (head := self._head.match(text)) and self._is_offered(head[1]):
            self._object = _Object(one.lead, depth=1, call=self._begin(head[1], calls))
            self._held = text[head.end() :]
            return "", True
        length = one.read(self._held, depth=0)
        if length is None and not ended:
            one.text, self._held = text, ""
            return "", False
        length = len(text) if length is None else len(one.text) + length
        self._object, self._held = None, text[length:]
        found = _call_of(text[:length], self._key)
        if found is None or not self._is_offered(found[0]):
            self._content_only = not self._tag
            return one.lead + text[:length], True
        call = self._begin(found[0], calls)
        self._end(call, found[1], found[1], calls)
        self._after_call, self._end_tag_due = True, self._hermes
        return "", True

    def _in_call(self, one: _Object, call: ToolCall, calls: list[CallDelta], ended: bool) -> bool:
        """Its arguments, and what else is in its object; whether there is more to read."""
        if not one.read_arguments:
            length = one.read(self._held, depth=1)
            piece = self._held[:length]
            one.text += piece
            self._held = self._held[len(piece) :]
            one.read_arguments = length is not None or ended
            if one.read_arguments:
                self._end(call, piece, one.text, calls)
            elif piece:
                calls.append(CallDelta(self._calls - 1, arguments=piece))
        if not one.read_arguments:
            return False
        length = one.read(self._held, depth=0)
        self._held = "" if length is None else self._held[length:]
        if length is None and not ended:
            return False
        self._object = None
        self._after_call, self._end_tag_due = True, self._hermes
        return True

    def _is_offered(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _begin(self, name: str, calls: list[CallDelta]) -> ToolCall:
        call = ToolCall(name, "")
        calls.append(CallDelta(self._calls, call.name, call.id))
        self._calls += 1
        return call

    def _end(self, call: ToolCall, piece: str, arguments: str, calls: list[CallDelta]) -> None:
        """`piece`: the last of its arguments."""
        whole = ToolCall(call.name, arguments, call.id)
        calls.append(CallDelta(self._calls - 1, arguments=piece, whole=whole))


@dataclass(slots=True)
class _Object:
    """A JSON object that comes in pieces."""

    lead: str
    """What stands before it, dropped with a call."""
    depth: int = 0
    """Of the objects around the next character."""
    call: ToolCall | None = None
    """The call that it is; None: not known yet."""
    text: str = ""
    """So far; of a call the arguments."""
    read_arguments: bool = False
    """Whether those of a call have ended."""
    _quoted: bool = False
    _escaped: bool = False

    def read(self, text: str, depth: int) -> int | None:
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


def _call_of(text: str, key: str) -> tuple[str, str] | None:
    """Name and arguments of a whole object that is a call."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get(key, {})
    if not isinstance(arguments, dict):
        return None
    return found["name"], json.dumps(arguments, ensure_ascii=False)
