"""Structural tags: what a text must be, and free text in which a trigger begins it.

xgrammar's objects, which vLLM and SGLang take: `structures` with `triggers`, or a `format`: of the
type triggered_tags, or of a type that binds the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cluster.frontend.structure import json_rule

_DEPTH_MAX = 16
"""Of forms within forms."""


class Tag(NamedTuple):
    begin: str
    content: str
    """As a rule has it."""
    end: str


def grammar_of_tags(given: Mapping[str, Any]) -> str:
    """In llguidance's variant of Lark. Raises ValueError, which names the field."""
    form = given.get("format")
    if form is None:
        tags = [_tag(each, _schema(each.get("schema"))) for each in _objects(given, "structures")]
        return _grammar(tags, _texts(given, "triggers"))
    if not isinstance(form, dict) or form.get("type") != "triggered_tags":
        return f"start: {_rule(form)}"
    tags = [_tag(each, _rule(each.get("content"))) for each in _objects(form, "tags")]
    return _grammar(tags, _texts(form, "triggers"))


def _rule(form: Any, depth: int = 0) -> str:
    """What a form binds a text to. Raises ValueError."""
    if depth > _DEPTH_MAX:
        raise ValueError(f"format: more than {_DEPTH_MAX} forms within each other")
    given = form if isinstance(form, dict) else {}
    match given.get("type"):
        case "const_string":
            return json.dumps(_text(given, "value"))
        case "json_schema":
            return _schema(given.get("json_schema"))
        case "regex":
            return f"/{_slashed(_text(given, 'pattern'))}/"
        case "tag":
            tag = _tag(given, _rule(given.get("content"), depth + 1))
            return f"({' '.join([*_literal(tag.begin), tag.content, *_literal(tag.end)])})"
        case "sequence" | "or" as kind:
            parts = [_rule(each, depth + 1) for each in _objects(given, "elements")]
            return f"({(' ' if kind == 'sequence' else ' | ').join(parts)})"
    raise ValueError(
        "format: its types are triggered_tags, and within it or alone const_string, json_schema,"
        " regex, tag, sequence and or"
    )


def _tag(given: Mapping[str, Any], content: str) -> Tag:
    begin, end = given.get("begin"), given.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError("structures: begin and end must be texts")
    return Tag(begin, content, end)


def _schema(given: Any) -> str:
    return json_rule({} if given is None else given)


def _text(given: Mapping[str, Any], name: str) -> str:
    found = given.get(name)
    if not isinstance(found, str):
        raise ValueError(f"format: {name} must be a text")
    return found


def _objects(given: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = given.get(name)
    if not isinstance(found, list) or not found or not all(isinstance(it, dict) for it in found):
        raise ValueError(f"{name}: must be a list of objects, and not empty")
    return found


def _texts(given: Mapping[str, Any], name: str) -> list[str]:
    found = given.get(name)
    if not isinstance(found, list) or not all(isinstance(it, str) and it for it in found):
        raise ValueError(f"{name}: must be a list of texts that are not empty")
    return found


def _grammar(tags: Sequence[Tag], triggers: Sequence[str]) -> str:
    """A trigger ends the free text before it: a tag that begins so must follow."""
    rules = []
    for number, tag in enumerate(tags):
        of = [at for at, trigger in enumerate(triggers) if tag.begin.startswith(trigger)]
        if not of:
            raise ValueError(f"triggers: none of them begins {tag.begin!r}")
        rest = tag.begin[len(triggers[of[0]]) :]
        parts = [f"lead{of[0]}", *_literal(rest), tag.content]
        rules.append(f"tag{number}: {' '.join([*parts, *_literal(tag.end)])}")
    any_trigger = "|".join(map(_escaped, triggers))
    return "\n".join(
        [
            f"start: ({' | '.join(f'tag{number}' for number in range(len(tags)))})* REST",
            f"REST: /(?s:.*)/ & ~/(?s:.*)({any_trigger})(?s:.*)/",
            *(
                f"lead{at}[lazy]: /(?s:.*){_escaped(trigger)}/"
                for at, trigger in enumerate(triggers)
            ),
            *rules,
        ]
    )


def _literal(text: str) -> list[str]:
    return [json.dumps(text)] if text else []


def _escaped(text: str) -> str:
    """Within the slashes of an expression."""
    return _slashed(re.escape(text))


def _slashed(pattern: str) -> str:
    """It may have escaped some itself."""
    return re.sub(r"\\?([/\n])|\\.", _escape, pattern)


def _escape(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[1], found[0])
