"""Proves: calls are read out of a text in either format, and what is none stays text; what a reader
has given out after some text does not depend on how it was cut, so that a stream says what a whole
answer says.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cluster.frontend.tools.reader import CallDelta, ToolReader
from cluster.frontend.tools.use import ToolFormat

NAMES = frozenset({"weather", "time"})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'
NO_TOOL = '{"name": "unknown", "parameters": {}} '
DEEP = '{"name": "time", "arguments": {"a": {"b": "}</tool_call>\\""}}, "c": 1}'
TYPED = '{"type": "function", "name": "weather", "parameters": {"city":"Rome"}}'
ROME, NO_ARGUMENTS = ("weather", '{"city": "Rome"}'), ("time", "{}")
READ = [
    ("hermes", "just text < here", "just text < here", []),
    ("hermes", CALL, "", [ROME]),
    ("hermes", f"I look.\n{CALL}\n{CALL}\n", "I look.", [ROME, ROME]),
    ("hermes", f"{CALL} and more", "and more", [ROME]),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', "", [NO_ARGUMENTS]),
    ("hermes", CALL.removesuffix("</tool_call>"), "", [ROME]),
    ("hermes", CALL.replace("}}", "}"), "", [ROME]),
    ("hermes", CALL[: CALL.index('e"}}')], "", [("weather", '{"city": "Rom')]),
    ("hermes", f"<tool_call>{DEEP}", "", [("time", '{"a": {"b": "}</tool_call>\\""}}')]),
    ("hermes", "<tool_call>no json</tool_call> x", "<tool_call>no json</tool_call> x", []),
    ("hermes", f"<tool_call>{{x {CALL}", "<tool_call>{x ", [ROME]),
    ("hermes", "a <tool_c", "a <tool_c", []),
    ("llama", LLAMA, "", [ROME]),
    ("llama", f"{LLAMA}; {LLAMA}", "", [ROME, ROME]),
    ("llama", f"{LLAMA}; {TYPED} x", "x", [ROME, ROME]),
    ("llama", NO_TOOL, NO_TOOL, []),
    ("llama", f" {NO_TOOL}{LLAMA}", f" {NO_TOOL}{LLAMA}", []),
    ("llama", f"{LLAMA}; {NO_TOOL}", NO_TOOL, [ROME]),
    ("llama", ' {"a": [1', ' {"a": [1', []),
    ("llama", "text {", "text {", []),
    ("llama", '{"name": "we', '{"name": "we', []),
]
PARTS = [CALL, LLAMA, DEEP, NO_TOOL, CALL[:40], LLAMA[:40], "<tool_call>", "</tool_call>", "</tool"]
PARTS += [*'{}"\\ <\nx', "; ", '"name": ', '"time", ', '"arguments": ', '"parameters": ']
FORMATS = st.sampled_from(ToolFormat)


class Read:
    """What a reader has given out."""

    def __init__(self, form: ToolFormat, parallel: bool = True) -> None:
        self._reader = ToolReader(form, NAMES, parallel)
        self.content = ""
        self.calls: list[list[str]] = []
        self.whole: list[tuple[str, str]] = []

    def push(self, text: str, ended: bool = False) -> tuple[Any, ...]:
        content, deltas = self._reader.push(text, ended)
        self.content += content
        for delta in deltas:
            self._take(delta)
        return self.content, [tuple(call) for call in self.calls], list(self.whole)

    def _take(self, delta: CallDelta) -> None:
        if delta.name:
            assert (delta.index, delta.arguments) == (len(self.calls), "")
            self.calls.append([delta.name, ""])
        assert delta.index == len(self.calls) - 1
        self.calls[-1][1] += delta.arguments
        if delta.whole is not None:
            self.whole.append((delta.whole.name, delta.whole.arguments))


@pytest.mark.parametrize(("form", "written", "content", "calls"), READ)
def test_calls_are_read(
    form: str, written: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert Read(ToolFormat(form)).push(written, ended=True)[::2] == (content, calls)


@given(FORMATS, st.booleans(), st.lists(st.sampled_from(PARTS), max_size=8).map("".join), st.data())
def test_what_was_given_out_does_not_depend_on_the_cuts(
    form: ToolFormat, parallel: bool, written: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=5)))
    cut, by_character = Read(form, parallel), Read(form, parallel)
    done = 0
    for at in [*cuts, len(written)]:
        said = cut.push(written[done:at])
        for char in written[done:at]:
            by_character.push(char)
        assert said == by_character.push("")
        done = at
    content, calls, whole = cut.push("", ended=True)
    every = Read(form)
    every.push(written, ended=True)
    assert content == every.content
    assert calls == (every.whole if parallel else every.whole[:1])
    assert calls == whole, "a call is what its parts are"
    assert calls or content == written, "what is no call is content"


def test_arguments_come_while_they_are_written() -> None:
    read = Read(ToolFormat.LLAMA)
    assert read.push(LLAMA[: LLAMA.index("Rome")])[1] == [("weather", '{"city": "')]
    assert json.loads(read.push(LLAMA[LLAMA.index("Rome") :])[2][0][1]) == {"city": "Rome"}
