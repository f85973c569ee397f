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

    def check(self, ignore_eos: bool) -> None:
        """Raises InvalidRequest."""
        if ignore_eos:
            raise InvalidRequest("ignore_eos", f"not with {self.kind}, which says where to end")
        if not all(self.texts) or not self.texts:
            raise InvalidRequest(self.kind, "must not be empty")
        if (size := sum(len(text.encode()) for text in self.texts)) > BYTES_MAX:
            raise InvalidRequest(self.kind, f"{size} bytes, at most {BYTES_MAX} allowed")
