"""Structural tags: free text in which a trigger begins what must have a form.

xgrammar's objects, which vLLM and SGLang take: `structures` with `triggers`, or a `format` of the
type triggered_tags whose contents are JSON schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Tag(NamedTuple):
    begin: str
    schema: Any
    end: str


def grammar_of_tags(given: Mapping[str, Any]) -> str:
    """In llguidance's variant of Lark. Raises ValueError, which names the field."""
    form = given.get("format")
    if form is None:
        tags = [_tag(each, each.get("schema")) for each in _objects(given, "structures")]
        return _grammar(tags, _texts(given, "triggers"))
    if not isinstance(form, dict) or form.get("type") != "triggered_tags":
        raise ValueError("format: must be of the type triggered_tags")
    tags = []
    for each in _objects(form, "tags"):
        content = each.get("content")
        if not isinstance(content, dict) or content.get("type") != "json_schema":
            raise ValueError("format.tags: each content must be of the type json_schema")
        tags.append(_tag(each, content.get("json_schema")))
    return _grammar(tags, _texts(form, "triggers"))


def _tag(given: Mapping[str, Any], schema: Any) -> Tag:
    begin, end = given.get("begin"), given.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError("structures: begin and end must be texts")
    return Tag(begin, {} if schema is None else schema, end)


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
        parts = [f"lead{of[0]}", *_literal(rest), f"%json {json.dumps(tag.schema)}"]
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
    return re.escape(text).replace("/", "\\/").replace("\n", "\\n")
