"""JSON as clients send it."""

from __future__ import annotations

import json
from typing import Any

_LEVELS_MAX = 100
"""Python's own bound is what is left of its stack. A value that was parsed near the bottom of one,
on a thread, could not be written again higher up."""
_TOO_DEEP = f"nested in more than {_LEVELS_MAX} levels"


def parsed_json(text: str) -> Any:
    """Raises ValueError; also for a value of more levels than are allowed."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_LEVELS_MAX):
        if not level:
            return value
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    raise ValueError(_TOO_DEEP)
