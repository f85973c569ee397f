"""JSON as clients send it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

_LEVELS_MAX = 100
"""Python's own bound is what is left of its stack. A value that was parsed near the bottom of one,
on a thread, could not be written again higher up."""
_TOO_DEEP = f"nested in more than {_LEVELS_MAX} levels"


def parsed_json(text: str | bytes | bytearray) -> Any:
    """Raises ValueError for what is no JSON in UTF-8, and for more levels than are allowed."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    _check_levels([value], _LEVELS_MAX)
    return value


def _check_levels(values: Iterable[Any], left: int) -> None:
    """Raises ValueError for values of more levels than are left."""
    for value in values:
        if isinstance(value, dict | list):
            if not left:
                raise ValueError(_TOO_DEEP)
            _check_levels(value.values() if isinstance(value, dict) else value, left - 1)
