"""What the new text of a call must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scheduler.errors import InvalidRequest

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
