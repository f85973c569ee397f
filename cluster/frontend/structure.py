"""What the new text of a call must be."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field as field_of
from typing import Any, Literal

from scheduler.errors import InvalidRequest

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As a schema alone is written."""
BYTES_MAX = 1 << 16
"""Of a schema, an expression or a grammar."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What the new text must be: one of `texts` (for `choice`), else what its one text describes:
    a JSON schema, a regular expression, a grammar in llguidance's variant of Lark."""

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    texts: Sequence[str]
    given_as: str = ""
    """The field that asks for it, where it is not the one named after the kind."""
    parts: Mapping[str, Structure] = field_of(default_factory=dict)
    """What a grammar refers to as @name."""

    @property
    def field(self) -> str:
        return self.given_as or self.kind

    def check(self, ignore_eos: bool) -> None:
        """Raises InvalidRequest."""
        if ignore_eos:
            raise InvalidRequest("ignore_eos", f"not with {self.field}: that says where to end")
        if not all(self.texts) or not self.texts:
            raise InvalidRequest(self.field, "must not be empty")
        if (size := sum(len(text.encode()) for text in self.texts)) > BYTES_MAX:
            raise InvalidRequest(self.field, f"{size} bytes, at most {BYTES_MAX} allowed")
        for part in self.parts.values():
            part.check(ignore_eos)

    @property
    def described(self) -> list[Any]:
        """As JSON has it: the arguments of `grammar_of`."""
        parts = {name: part.described for name, part in self.parts.items()}
        return [self.kind, list(self.texts), parts]


class Markup:
    """How a grammar names markers of a target: a special token is no text to it."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """`special`: the tokens that a grammar takes for special, by their names."""
        self._special = special
        names = sorted(special, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def is_special(self, text: str) -> bool:
        """Whether it is one special token."""
        return text in self._special

    def literal(self, text: str) -> str:
        """The text in Lark; empty for an empty one."""
        parts, at = list[str](), 0
        for found in self._names.finditer(text):
            parts += [_quoted(text[at : found.start()]), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        return " ".join(filter(None, [*parts, _quoted(text[at:])]))


def json_rule(schema: Any) -> str:
    """A document of this schema, in Lark."""
    compact = {**schema, "x-guidance": _COMPACT} if isinstance(schema, dict) else schema
    return f"%json {json.dumps(compact)}"


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
