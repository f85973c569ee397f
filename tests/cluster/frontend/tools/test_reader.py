"""Proves: calls are read out of a text in every format, and what is none stays text; an object is
a call with all the arguments that it has, or content; what a reader has given out after some text
does not depend on how it was cut, so that a stream says what a whole answer says.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cluster.frontend.tools import TOOL_FORMATS, CallDelta, ToolFormat, ToolReader

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
    ("llama3_json", LLAMA, "", [ROME]),
    ("llama3_json", f"{LLAMA}; {LLAMA}", "", [ROME, ROME]),
    ("llama3_json", f"{LLAMA}; {TYPED} x", "x", [ROME, ("weather", '{"city":"Rome"}')]),
    ("llama3_json", NO_TOOL, NO_TOOL, []),
    ("llama3_json", f" {NO_TOOL}{LLAMA}", f" {NO_TOOL}{LLAMA}", []),
    ("llama3_json", f"{LLAMA}; {NO_TOOL}", NO_TOOL, [ROME]),
    ("llama3_json", ' {"a": [1', ' {"a": [1', []),
    ("llama3_json", "text {", "text {", []),
    ("llama3_json", '{"name": "we', '{"name": "we', []),
    # By the name of the other format.
    ("hermes", CALL.replace("arguments", "parameters"), "", [ROME]),
    ("llama3_json", LLAMA.replace("parameters", "arguments"), "", [ROME]),
]
TYPES: dict[str, Any] = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
        "any": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
    }
}
NAMES: dict[str, dict[str, Any]] = {"weather": TYPES, "time": {}}
ARGUMENTS = {"city": ' "Rome"\n<b>', "days": 2, "deep": {"a": [True, None]}, "any": True}
FULL = [("weather", ARGUMENTS), ("time", {})]
JSON_TEXT = json.dumps(ARGUMENTS)
CALLS, CALL_BEGIN, CALL_END, CALLS_END, SEP = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "call\u2581begin", "call\u2581end", "calls\u2581end", "sep")
)
TAGGED = """<tool_call>
<function=weather>
<parameter=city>
 "Rome"
<b>
</parameter>
<parameter=days>
2
</parameter>
<parameter=deep>
{"a": [true, null]}
</parameter>
<parameter=any>
True
</parameter>
</function>
</tool_call>
<tool_call>
<function=time>
</function>
</tool_call>"""
PAIRS = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value> "Rome"
<b></arg_value>
<arg_key>days</arg_key>
<arg_value>2</arg_value>
<arg_key>deep</arg_key><arg_value>{"a": [True, None]}</arg_value>
<arg_key>any</arg_key>
<arg_value>true</arg_value>
</tool_call><tool_call>time</tool_call>"""
PYTHON = "[weather(city=' \"Rome\"\\n<b>', days=2, deep={'a': [true, None]}, any=True), time()]"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    + JSON_TEXT
    + "<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>"
)
DEEPSEEK = (
    f"{CALLS}{CALL_BEGIN}function{SEP}weather\n```json\n{JSON_TEXT}\n```{CALL_END}\n"
    f"{CALL_BEGIN}function{SEP}time\n```json\n{{}}\n```{CALL_END}{CALLS_END}"
)
WRITTEN = {
    "hermes": f'<tool_call>{{"name": "weather", "arguments": {JSON_TEXT}}}</tool_call>'
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
    "qwen3_coder": TAGGED,
    "glm45": PAIRS,
    "mistral": f"[TOOL_CALLS]weather[ARGS]{JSON_TEXT}[TOOL_CALLS]time[ARGS]{{}}",
    "mistral_json": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON_TEXT}}}, '
    '{"name": "time", "arguments": {}}]',
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": f"{CALLS}{CALL_BEGIN}weather{SEP}{JSON_TEXT}{CALL_END}{CALL_BEGIN}time{SEP}{{}}"
    f"{CALL_END}{CALLS_END}",
    "kimi_k2": KIMI,
    "gpt_oss": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON_TEXT}"
    "<|channel|>commentary to=functions.time <|constrain|>json<|message|>{}",
    "llama3_json": f'{{"name": "weather", "parameters": {JSON_TEXT}}}; '
    '{"name": "time", "parameters": {}}',
    "pythonic": PYTHON,
    "glm4": f"weather\n{JSON_TEXT}\ntime\n{{}}",
}
"""Two calls, in each format."""
ROUND = '{"city": "Rome"}'
OBJECTS: list[tuple[str, tuple[str, str] | None]] = [
    # What is not said is none.
    ('{"name": "time"}', NO_ARGUMENTS),
    ('{"name": "time", "arguments": {}}', NO_ARGUMENTS),
    ('{"name": "time", "arguments": {}', NO_ARGUMENTS),
    ('{"name": "time", "arguments": null}', NO_ARGUMENTS),
    ('{"id": "c", "type": "function", "name": "time"}', NO_ARGUMENTS),
    # By both names, or behind others: all of it, in the target's own words.
    (f'{{"name": "weather", "arguments": {{}}, "parameters": {ROUND}}}', None),
    (f'{{"name": "weather", "parameters": {{}}, "arguments": {ROUND}}}', None),
    (f'{{"name": "weather", "arguments": null, "parameters": {ROUND}}}', ROME),
    (f'{{"arguments": {ROUND}, "parameters": {ROUND}, "name": "weather"}}', ROME),
    (f'{{"arguments": {ROUND}, "parameters": {{"city": "Oslo"}}, "name": "weather"}}', None),
    (f'{{"arguments": {ROUND}, "name": "weather"', ROME),
    ('{"arguments": {"a": 1e1, "a": 2}, "name": "time"}', ("time", '{"a": 1e1, "a": 2}')),
    ('{"arguments": {"a": "\\ud800"}, "name": "time"}', ("time", '{"a": "\\ud800"}')),
    # By a name that is not known, twice, or no object.
    ('{"name": "time", "args": {"a": 1}}', None),
    ('{"name": "time", "a": 1}', None),
    ('{"name": "time", "id": {}', None),
    ('{"name": "time"', None),
    ('{"name": "time", "name": "weather", "arguments": {"a": 1}}', None),
    ('{"type": "function", "name": "time", "arguments": {}, "arguments": {"a": 1}}', None),
    ('{"name": "time", "arguments": [1]}', None),
    ('{"name": "time", "arguments": "{}"}', None),
    ('{"name": "time", "arguments": 5}', None),
    ('{"name": "time", "arguments": {"a": 1}]', ("time", '{"a": 1}')),
    # What Python would read, and others would not.
    ('{"arguments": {"a": NaN}, "name": "time"}', None),
    ('{"arguments": {"a": -Infinity}, "name": "time"}', None),
    (f'{{"arguments": {{"a": {"9" * 5000}}}, "name": "time"}}', None),
    (f'{{"arguments": {{"a": {"[" * 100000}{"]" * 100000}}}, "name": "time"}}', None),
    # No name of a function.
    ('{"arguments": {}, "name": "\\ud800"}', None),
    ('{"arguments": {}, "name": "a b"}', None),
    ('{"arguments": {}, "name": ""}', None),
    ('{"arguments": {}, "name": ["time"]}', None),
    ('{"arguments": {}}', None),
]
PARTS = [CALL, LLAMA, DEEP, NO_TOOL, CALL[:40], LLAMA[:40], "<tool_call>", "</tool_call>", "</tool"]
PARTS += [*WRITTEN.values(), "[TOOL_CALLS]", "weather", "(", ")", "[", "]", "<parameter=city>\n"]
PARTS += ["<arg_key>", CALLS, CALL_BEGIN, SEP, "</arg_value>", "\n</parameter>", "</function>"]
PARTS += [*'{}"\\ <\nx', "; ", '"name": ', '"time", ', '"arguments": ', '"parameters": ']
FORMATS = st.sampled_from(list(TOOL_FORMATS.values()))


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
    assert Read(TOOL_FORMATS[form]).push(written, ended=True)[::2] == (content, calls)


@pytest.mark.parametrize("form", TOOL_FORMATS.values(), ids=TOOL_FORMATS)
def test_each_format_is_read(form: ToolFormat) -> None:
    written = WRITTEN[form.name]
    lead, trail = ("I look. ", " So.") if form.marker else ("", "")
    content, _, calls = Read(form).push(lead + written + trail, ended=True)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == FULL
    assert content == lead.strip() + trail.strip()
    forced = ToolReader(form, NAMES, forced=True)
    for size in range(len(written)):
        said = ToolReader(form, NAMES, forced=True).push(written[:size], ended=True)[0]
        assert said == "", "a call that is cut is no content"
    assert forced.push(written, ended=True)[0] == ""


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "kimi_k2", "llama3_json"])
def test_the_end_of_a_call_that_is_cut_is_no_content(name: str) -> None:
    form, written = TOOL_FORMATS[name], WRITTEN[name]
    for size in range(
        written.rindex("}" if name != "qwen3_coder" else "</function>"), len(written)
    ):
        assert Read(form).push(written[:size], ended=True)[0] == ""


@pytest.mark.parametrize("form", [TOOL_FORMATS["hermes"], TOOL_FORMATS["llama3_json"]])
@pytest.mark.parametrize(("written", "call"), OBJECTS, ids=[written[:60] for written, _ in OBJECTS])
def test_an_object_is_a_call_with_all_its_arguments_or_content(
    form: ToolFormat, written: str, call: tuple[str, str] | None
) -> None:
    lead, trail = ("<tool_call>", "</tool_call>") if form.marker else ("", "")
    content, _, calls = Read(form).push(lead + written + trail, ended=True)
    assert (content, calls) == (("", [call]) if call else (lead + written + trail, []))


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


VALUES = st.recursive(
    st.sampled_from([None, True, 0, 10**400, 1e400, float("nan"), "", "\ud800", "}</tool_call>;"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=4,
)
FIELDS = st.tuples(
    st.sampled_from(["name", "arguments", "parameters", "id", "else"]),
    st.sampled_from(["time", "weather", "a b"]) | VALUES | st.dictionaries(st.just("a"), VALUES),
)
OBJECTS_OF_ANY_FIELDS = st.lists(FIELDS, max_size=4).map(
    lambda fields: "{" + ", ".join(f'"{key}": {json.dumps(value)}' for key, value in fields) + "}"
)


@given(
    FORMATS, OBJECTS_OF_ANY_FIELDS, st.integers(0, 80), st.sampled_from(["", "}", "</tool_call>"])
)
def test_whatever_a_target_writes_is_content_or_a_call_in_its_own_words(
    form: ToolFormat, written: str, size: int, rest: str
) -> None:
    """Also one that is broken off."""
    lead = "<tool_call>" if form.marker else ""
    written = lead + written[: size or None] + rest
    content, calls, whole = Read(form).push(written, ended=True)
    assert calls == whole
    assert calls or content == written
    for name, arguments in calls:
        assert name in ("time", "weather")
        f"{name}{arguments}{content}".encode()
        given = [arguments] if arguments in written else []
        assert given or not re.search(r'"(arguments|parameters|else)": [^n]', written)


def test_arguments_come_while_they_are_written() -> None:
    read = Read(TOOL_FORMATS["llama3_json"])
    assert read.push(LLAMA[: LLAMA.index("Rome")])[1] == [("weather", '{"city": "')]
    assert json.loads(read.push(LLAMA[LLAMA.index("Rome") :])[2][0][1]) == {"city": "Rome"}
