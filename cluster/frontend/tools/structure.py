"""What binds an answer to tools: a grammar in llguidance's Lark, made from the format's parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.frontend.structure import Markup, Structure, json_rule
from cluster.frontend.tools.formats import ToolFormat
from cluster.frontend.tools.use import ToolUse

_ANYTHING = r"/(?s:.*)/"


def tool_structure(
    use: ToolUse, form: ToolFormat, markup: Markup, text: Structure | None, header: str = ""
) -> Structure | None:
    """What binds an answer to these tools: calls alone where one is required, text and calls where
    some tool is strict; else nothing does. `text`: what binds an answer that is no call, which
    `header` stands before. Raises InvalidRequest for a name that is not offered."""
    if not use.binds and text is None:
        return None
    rules = _Rules(use, form, markup)
    if use.forced:
        return rules.made("start: calls", {})
    if text is not None:
        return rules.made(f"start: calls | {markup.literal(header)} @text", {"text": text})
    return rules.made(rules.among_text(), {})


class _Rules:
    """The rules of calls; `calls` is a run of them."""

    def __init__(self, use: ToolUse, form: ToolFormat, markup: Markup) -> None:
        self._form, self._markup = form, markup
        self._parallel = use.may_repeat
        self._lines: list[str] = []
        self._offered = use.offered
        self._bound = [use.forced or function.strict for function in self._offered]
        self._names = [self._named(number) for number in range(len(self._offered))]

    def made(self, start: str, parts: Mapping[str, Structure]) -> Structure:
        self._lines.append("calls: " + self._run(self._form.begin, self._form.prefix))
        self._lines.append("one: " + self._call(self._form.prefix))
        return Structure("grammar", ("\n".join([start, *self._lines]),), "tools", parts)

    def among_text(self) -> str:
        """The first rule of text with calls in it."""
        form, repeat = self._form, "*" if self._parallel else "?"
        if not form.marker:
            first = _escaped(form.opening[:1])
            self._lines.append(f"text: /([^{first}](?s:.*))?/" if first else f"text: {_ANYTHING}")
            return "start: calls | text"
        # A marker that is in each call stands before the first one alone, and a run has one call.
        rest = form.opening.removeprefix(form.marker)
        run = self._call(rest) if not form.begin else self._run("", rest)
        self._lines.append(f"run: {run}")
        if self._markup.is_special(form.marker):
            self._lines.append(f"text: {_ANYTHING}")
            return f"start: text ({self._markup.literal(form.marker)} run text){repeat}"
        self._lines += [
            f"lead[suffix={json.dumps(form.marker)}]: {_ANYTHING}",
            f"REST: {_ANYTHING} & ~/(?s:.*){_escaped(form.marker)}(?s:.*)/",
        ]
        return f"start: (lead run){repeat} REST"

    def _run(self, begin: str, prefix: str) -> str:
        """Calls one after the other; `prefix`: of the first one."""
        literal = self._markup.literal
        more = f"({literal(self._form.between)} one)*" if self._parallel else ""
        return f"{literal(begin)} {self._call(prefix)} {more} {literal(self._form.end)}"

    def _call(self, prefix: str) -> str:
        """One call of any tool."""
        options = [
            self._markup.literal(prefix + function.name + self._form.infix) + f" {rule}"
            for function, rule in zip(self._offered, self._names, strict=True)
        ]
        suffix = self._markup.literal(self._form.suffix)
        return f"({' | '.join(options)}) {suffix}"

    def _named(self, number: int) -> str:
        """The rule of a tool's arguments."""
        function, name = self._offered[number], f"a{number}"
        schema = function.schema_of_arguments if self._bound[number] else {"type": "object"}
        if self._form.arguments in ("object", "head"):
            self._lines.append(f"{name}: {json_rule(schema)}")
            return name
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        values = {}
        for place, (key, inner) in enumerate(properties.items()):
            inner = inner if isinstance(inner, dict) else {}
            values[key] = self._value(f"{name}_{place}", key, inner | shared)
        make = self._tagged if self._form.arguments == "tags" else self._python
        self._lines.append(f"{name}: {make(values, required)}")
        return name

    def _value(self, name: str, key: str, schema: dict[str, Any]) -> str:
        """The rule of one argument with its name."""
        literal, form = self._markup.literal, self._form
        if form.arguments == "python":
            self._lines.append(f"{name}: {literal(key + '=')} {json_rule(schema)}")
            return name
        before, behind = form.key[0] + key + form.key[1] + form.value[0], form.value[1]
        if schema.get("type") == "string":
            choices = schema.get("enum")
            if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
                value = "(" + " | ".join(map(json.dumps, choices)) + f") {literal(behind)}"
            elif self._markup.is_special(behind.strip()):
                self._lines.append(f"{name}_t: {_ANYTHING}")
                value = f"{name}_t {literal(behind)}"
            else:
                self._lines.append(f"{name}_t[suffix={json.dumps(behind)}]: {_ANYTHING}")
                value = f"{name}_t"
        else:
            value = f"{json_rule(schema)} {literal(behind)}"
        self._lines.append(f"{name}: {literal(before)} {value}")
        return name

    def _tagged(self, values: Mapping[str, str], required: Sequence[str]) -> str:
        parts = [rule if key in required else f"{rule}?" for key, rule in values.items()]
        return " ".join(parts) or '""'

    def _python(self, values: Mapping[str, str], required: Sequence[str]) -> str:
        """Those that are required, then others in their order, with commas between them."""
        comma = self._markup.literal(", ")
        must = f" {comma} ".join(rule for key, rule in values.items() if key in required)
        optional = [rule for key, rule in values.items() if key not in required]
        if must:
            return " ".join([must, *(f"({comma} {rule})?" for rule in optional)])
        starts = [
            " ".join([rule, *(f"({comma} {other})?" for other in optional[at + 1 :])])
            for at, rule in enumerate(optional)
        ]
        return f"({' | '.join(starts)})?" if starts else '""'


def _escaped(text: str) -> str:
    """In an expression of Lark."""
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$/&~#-" else char for char in text)
