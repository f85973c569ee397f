"""Renders our chart without Helm: the part of its template language that the chart uses.

Anything else in a template is an error here, so that a template never passes unread. That Helm
itself renders the same is tested where `helm` is installed.

`python -m tests.cluster.kubernetes.helm` writes deploy/kuberay.yaml anew.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
CHART = DEPLOY / "helm" / "lockstep"
EXAMPLES = sorted((DEPLOY / "helm" / "examples").glob("*.yaml"))
RELEASE = "lockstep"
KUBERAY = DEPLOY / "kuberay.yaml"

HEADER = """\
# Lockstep on Kubernetes by the KubeRay operator (docs/deploy.md). Do not edit: this is what the
# chart deploy/helm/lockstep renders with its own values, to read and to compare. With yours:
# `helm template lockstep deploy/helm/lockstep -f my-values.yaml | kubectl apply -f -`.
"""


class RenderError(Exception):
    """The chart refuses its values, in its own words."""


_ACTION = re.compile(r"\{\{(-?)\s(.*?)\s(-?)\}\}", re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()|]|[^\s()|"]+')


def values(*examples: Path) -> dict[str, Any]:
    """The chart's values with those of the files laid over them."""
    merged = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in examples:
        merged = overlaid(merged, yaml.safe_load(path.read_text()))
    return merged


def overlaid(below: Any, above: Any) -> Any:
    """As Helm merges: mappings key by key, all else replaced."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return copy.deepcopy(above)
    return {
        key: overlaid(below.get(key), above[key]) if key in above else copy.deepcopy(below[key])
        for key in [*below, *(key for key in above if key not in below)]
    }


def render(given: Mapping[str, Any]) -> str:
    """All resources in one text, one document each, in the order of their files."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    root = {
        "Values": given,
        "Release": {"Name": RELEASE},
        "Chart": {"AppVersion": chart["appVersion"]},
    }
    templates: dict[str, list[_Node]] = {}
    paths = sorted((CHART / "templates").iterdir())
    bodies = {path: _parsed(path.read_text(), templates) for path in paths}
    rendered = [
        _Renderer(root, templates).text(bodies[path], root).strip("\n")
        for path in paths
        if path.suffix == ".yaml"
    ]
    return "\n---\n".join(text for text in rendered if text) + "\n"


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


# --------------------------------------------------------------------------- parsing


@dataclass
class _Node:
    """Text, an expression to print, or a block with its branches."""

    kind: str
    text: str = ""
    body: list[_Node] = field(default_factory=list)
    otherwise: list[_Node] = field(default_factory=list)


def _parsed(source: str, templates: dict[str, list[_Node]]) -> list[_Node]:
    """The nodes of a file; what it defines goes into `templates`."""
    pieces = iter(_pieces(source))
    nodes, ended = _block(pieces, templates)
    assert ended == "", f"{ended} without a block"
    return nodes


def _pieces(source: str) -> Iterator[tuple[str, str]]:
    """(kind, text): text as it stands, and actions; `{{-` and `-}}` take the blanks beside them."""
    at = 0
    trimmed = False
    for found in _ACTION.finditer(source):
        left, action, right = found.groups()
        text = source[at : found.start()]
        text = text.lstrip() if trimmed else text
        yield "text", text.rstrip() if left else text
        yield "action", action
        at, trimmed = found.end(), bool(right)
    yield "text", source[at:].lstrip() if trimmed else source[at:]


def _block(
    pieces: Iterator[tuple[str, str]], templates: dict[str, list[_Node]]
) -> tuple[list[_Node], str]:
    """Nodes up to `end` or `else`, and which of the two it was; "" at the end of the file."""
    nodes: list[_Node] = []
    for kind, text in pieces:
        word, _, rest = text.partition(" ")
        if kind == "text":
            nodes.append(_Node("text", text))
        elif text in ("end", "else"):
            return nodes, text
        elif word in ("if", "with", "define"):
            body, ended = _block(pieces, templates)
            otherwise: list[_Node] = []
            if ended == "else":
                otherwise, ended = _block(pieces, templates)
            assert ended == "end", f"{text} has no end"
            if word == "define":
                templates[rest.strip('"')] = body
            else:
                nodes.append(_Node(word, rest, body, otherwise))
        else:
            nodes.append(_Node("print", text))
    return nodes, ""


# --------------------------------------------------------------------------- evaluating


class _Renderer:
    def __init__(self, root: Mapping[str, Any], templates: Mapping[str, list[_Node]]) -> None:
        self._root = root
        self._templates = templates
        self._functions: Mapping[str, Callable[..., Any]] = {
            "add": lambda *numbers: sum(numbers),
            "mul": lambda left, right: left * right,
            "lt": lambda left, right: left < right,
            "printf": lambda form, *given: form % given,
            "default": lambda fallback, given: given or fallback,
            "quote": lambda given: f'"{given}"',
            "hasKey": lambda given, key: key in given,
            "fail": _fail,
            "fromYaml": yaml.safe_load,
            "toYaml": lambda given: yaml.safe_dump(given, width=1000).rstrip("\n"),
            "mergeOverwrite": overlaid,
            "nindent": lambda width, given: "\n" + _indented(given, width),
            "sha256sum": lambda given: hashlib.sha256(given.encode()).hexdigest(),
            "trunc": lambda length, given: given[:length],
            "include": lambda name, dot: self.text(self._templates[name], dot).strip("\n"),
        }

    def text(self, nodes: list[_Node], dot: Any) -> str:
        parts = []
        for node in nodes:
            if node.kind == "text":
                parts.append(node.text)
                continue
            value = self._value(_TOKEN.findall(node.text), dot)
            if node.kind == "print":
                parts.append(str(value))
            elif value:
                parts.append(self.text(node.body, value if node.kind == "with" else dot))
            else:
                parts.append(self.text(node.otherwise, dot))
        return "".join(parts)

    def _value(self, tokens: list[str], dot: Any) -> Any:
        """Of a pipeline; uses the tokens up, to a closing bracket at most."""
        value = self._call(tokens, dot)
        while tokens and tokens[0] == "|":
            tokens.pop(0)
            value = self._call(tokens, dot, value)
        return value

    def _call(self, tokens: list[str], dot: Any, *piped: Any) -> Any:
        head = tokens[0]
        operands: list[Any] = []
        if head in self._functions:
            tokens.pop(0)
        while tokens and tokens[0] not in (")", "|"):
            operands.append(self._operand(tokens, dot))
        if head in self._functions:
            return self._functions[head](*operands, *piped)
        assert not piped, f"{head}: no function that is known here"
        (value,) = operands
        return value

    def _operand(self, tokens: list[str], dot: Any) -> Any:
        token = tokens.pop(0)
        if token == "(":
            value = self._value(tokens, dot)
            assert tokens.pop(0) == ")"
            return value
        if token.startswith('"'):
            return token[1:-1]
        if token.isdigit():
            return int(token)
        assert token.startswith("."), f"{token}: no function that is known here"
        value = dot
        for key in filter(None, token.split(".")):
            assert key in value, f"{token}: the values have no {key}"
            value = value[key]
        return value


def _fail(message: str) -> None:
    raise RenderError(message)


def _indented(text: str, width: int) -> str:
    return "\n".join(" " * width + line if line else line for line in text.split("\n"))


def main() -> None:
    KUBERAY.write_text(HEADER + render(values()))


if __name__ == "__main__":
    main()
