"""Reads the calls of tools out of an answer's text while it is written.

A call begins when its name is known and its arguments have begun. From there on its arguments are
given out as they come, in the target's own words, also where they turn out to be no JSON. What ends
before that point and is no call is content, as it stands. So is an object whose arguments are not
plain to see: without any but with other fields, with two that differ, or with what is no object.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.frontend.text import tail_of
from cluster.frontend.tools.formats import ToolFormat, pattern_of
from cluster.frontend.tools.json_objects import HEAD, Scan, call_of
from cluster.frontend.tools.values import Tags, python_calls, python_end

_ANY_NAME = r"[a-zA-Z0-9_.-]{1,64}"
_OPENING_CHARS_MAX = 256
"""Of what stands before a call's arguments."""


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

    def __init__(
        self,
        form: ToolFormat,
        tools: Mapping[str, Mapping[str, Any]],
        parallel: bool = True,
        forced: bool = False,
    ) -> None:
        """`tools`: the schemas of arguments, by name. `parallel`: whether calls behind the first
        one are given out. `forced`: the answer is calls alone, so what is no call is the beginning
        of one that was cut, and no content."""
        self._form = form
        self._tools = tools
        self._parallel = parallel
        self._forced = forced
        # Where nothing else marks a call, only an object with one of these names is one.
        self._name = _ANY_NAME if form.marker else "|".join(map(re.escape, tools)) or r"(?!)"
        whole = form.opening.removeprefix(form.marker)
        self._opening, self._next = map(self._opening_of, (whole, form.prefix))
        begin = re.escape(form.begin.removeprefix(form.marker))
        may_open = {"object": rf"\s*(?:{begin})?\s*", "python": rf"\s*(?:{begin}\s*[\w.-]*\s*)?"}
        if form.arguments == "object":
            # The name may stand behind the arguments.
            self._opening, self._next = (
                re.compile(may_open["object"] + r"(?=\{)"),
                re.compile(r"\s*(?=\{)"),
            )
        may = may_open.get(form.arguments, r"(?s:.*)" if form.marker else r"\s*[\w.-]*\s*")
        self._may_open = re.compile(may)
        """What may yet become an opening."""
        pieces = (form.suffix.removeprefix("}"), form.between, form.end)
        self._tails = tuple(filter(None, (part for piece in pieces for part in piece.split())))
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
        if self._forced:
            content = ""
        return content, [delta for delta in deltas if self._parallel or not delta.index]

    def _opening_of(self, literal: str) -> re.Pattern[str]:
        """What stands before the arguments of a call, from behind its marker on."""
        form = self._form
        head = pattern_of(form.infix) + r"(?=\{)"
        behind = {"head": head, "tags": r"(?=\s*[<>])>?", "python": r"(?=\s*\()"}
        name = rf"({self._name}){behind.get(form.arguments, '')}"
        return re.compile(rf"\s*{pattern_of(literal)}\s*{name}")

    # Each yield below waits for more text, or for the end.

    def _read(self) -> Iterator[None]:
        form = self._form
        while (lead := (yield from self._up_to_call())) is not None:
            called = yield from self._call(lead, self._opening)
            while called:
                yield from self._past_call()
                if form.marker and not form.begin:  # the next call has a marker of its own
                    break
                called = yield from self._call("", self._next)
            if not form.marker:
                break
        while True:
            self._say(len(self._held))
            yield

    def _up_to_call(self) -> Generator[None, None, str | None]:
        """Reads the content before what may be a call. Returns its marker with the white space
        before it; None where no call can come any more."""
        marker = self._form.marker
        while (at := self._held.find(marker)) < 0:
            bare = self._held.rstrip()
            if self._ended:
                return None
            self._say(len(bare[: len(bare) - tail_of(bare, (marker,))].rstrip()))
            yield
        content = self._held[:at].rstrip()
        lead = self._held[len(content) : at + len(marker)]
        self._say(len(content))
        self._held = self._held[len(lead) :]
        return lead

    def _call(self, lead: str, opening: re.Pattern[str]) -> Generator[None, None, bool]:
        """Reads a call, if one stands here. Else the `lead` is content, and so is an object."""
        while (found := opening.match(self._held[:_OPENING_CHARS_MAX])) is None:
            if self._ended or self._no_opening():
                self._content += lead
                return False
            yield
        match self._form.arguments:
            case "object":
                begin = self._held[: found.end()]
                self._held = self._held[found.end() :]
                return (yield from self._object(lead + begin))
            case "python":
                return (yield from self._python(lead))
        self._held = self._held[found.end() :]
        if self._form.arguments == "tags":
            yield from self._tagged(found[1])
        else:
            yield from self._arguments(found[1])
        return True

    def _no_opening(self) -> bool:
        """Whether what is held can become none."""
        held = self._held
        return len(held) >= _OPENING_CHARS_MAX or self._may_open.fullmatch(held) is None

    def _object(self, lead: str) -> Generator[None, None, bool]:
        """Whether it is a call; else it is content, and so is the `lead` before it."""
        scan, text = Scan(), ""
        while True:
            new, self._held = self._held, ""
            text += new
            if (head := HEAD.match(text)) and self._is_name(head[1]):
                self._held = text[head.end() :]
                yield from self._arguments(head[1])
                scan = Scan(depth=1)
                while (size := scan.end(self._held, depth=0)) is None:
                    self._held = ""
                    if self._ended:
                        return True
                    yield
                self._held = self._held[size:]
                return True
            size = scan.end(new, depth=0)
            if size is not None or self._ended:
                break
            yield
        if size is not None:
            text, self._held = text[: len(text) - len(new) + size], new[size:]
        called = call_of(text)
        if called is None or not self._is_name(called[0]):
            self._content += lead + text
            return False
        name, arguments = called
        self._end(self._begin(name), arguments, arguments)
        return True

    def _is_name(self, name: str) -> bool:
        return re.fullmatch(self._name, name) is not None

    def _arguments(self, name: str) -> Iterator[None]:
        """A JSON object, as it comes."""
        call, arguments = self._begin(name), ""
        depth = int(self._form.arguments == "object")
        """Of the objects around it."""
        scan = Scan(depth)
        while True:
            size = scan.end(self._held, depth=depth)
            piece = self._held[:size]
            self._held = self._held[len(piece) :]
            arguments += piece
            if size is not None or self._ended:
                break
            if piece:
                self._deltas.append(CallDelta(self._begun - 1, arguments=piece))
            yield
        self._end(call, piece, arguments)

    def _tagged(self, name: str) -> Iterator[None]:
        """Arguments between tags, each as JSON once it is known, texts as they come."""
        call, arguments = self._begin(name), ""
        tags = Tags(self._form, self._tools.get(name, {}))
        while True:
            piece, self._held, done = tags.push(self._held, self._ended)
            arguments += piece
            if done or self._ended:
                break
            if piece:
                self._deltas.append(CallDelta(self._begun - 1, arguments=piece))
            yield
        self._end(call, piece, arguments)

    def _python(self, lead: str) -> Generator[None, None, bool]:
        """A list of calls, once it is whole. Whether it is one; else it is content."""
        while (size := python_end(self._held)) is None and not self._ended:
            yield
        calls = python_calls(self._held[:size])
        if not calls or any(name not in self._tools for name, _ in calls):
            self._content += lead
            return False
        self._held = self._held[size:]
        for name, arguments in calls:
            self._end(self._begin(name), arguments, arguments)
        return True

    def _past_call(self) -> Iterator[None]:
        """Drops what belongs to it, up to what comes next."""
        while True:
            self._held = self._held.lstrip()
            tail = next((tail for tail in self._tails if self._held.startswith(tail)), None)
            if tail is not None:
                self._held = self._held[len(tail) :]
            elif any(tail.startswith(self._held) for tail in self._tails) or not self._held:
                if self._ended:
                    self._held = ""
                    return
                yield
            else:
                return

    def _say(self, size: int) -> None:
        """So many characters of the held text are content."""
        self._content += self._held[:size]
        self._held = self._held[size:]

    def _begin(self, name: str) -> ToolCall:
        call = ToolCall(name, "")
        if self._form.id:
            call = ToolCall(name, "", self._form.id.format(name=name, index=self._begun))
        self._deltas.append(CallDelta(self._begun, call.name, call.id))
        self._begun += 1
        return call

    def _end(self, call: ToolCall, piece: str, arguments: str) -> None:
        """`piece`: the last of its arguments."""
        whole = ToolCall(call.name, arguments, call.id)
        self._deltas.append(CallDelta(self._begun - 1, arguments=piece, whole=whole))
