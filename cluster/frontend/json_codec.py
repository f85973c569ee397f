"""JSON as clients send it, and as they get it: a long answer is written piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

_LEVELS_MAX = 100
"""Python's own bound is what is left of its stack. A value that was parsed near the bottom of one,
on a thread, could not be written again higher up."""
_TOO_DEEP = f"nested in more than {_LEVELS_MAX} levels"

_ITEMS = 64
"""Of a long array in one piece. With 20 likeliest tokens each takes some 60 us to write."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LongArray:
    """Stands for a JSON array whose values are made as it is written, and not kept."""

    items: Sequence[Any]
    value: Callable[[Any], Any]
    """Of an item."""


def json_array(items: Sequence[_T], value: Callable[[_T], Any]) -> list[Any] | LongArray:
    """A plain list, if it is short."""
    if len(items) <= _ITEMS:
        return [value(item) for item in items]
    return LongArray(items, value)


def json_pieces(value: Any) -> Iterator[str]:
    """The text of a value that may hold long arrays: in fields, and in objects that lists hold."""
    if isinstance(value, LongArray):
        yield "["
        for at in range(0, len(value.items), _ITEMS):
            made = [value.value(item) for item in value.items[at : at + _ITEMS]]
            yield "," * (at > 0) + _text(made)[1:-1]
        yield "]"
    elif isinstance(value, dict) and _is_long(value):
        before = "{"
        for name, field in value.items():
            yield f"{before}{_text(name)}:"
            yield from json_pieces(field)
            before = ","
        yield "}"
    elif isinstance(value, list) and _is_long(value):
        before = "["
        for item in value:
            yield before
            yield from json_pieces(item)
            before = ","
        yield "]"
    else:
        yield _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _is_long(value: Any) -> bool:
    """Whether there is a long array in it."""
    if isinstance(value, dict):
        return any(map(_is_long, value.values()))
    if isinstance(value, list):
        # The first one of a list of plain values tells of all.
        return bool(value) and isinstance(value[0], dict) and any(map(_is_long, value))
    return isinstance(value, LongArray)


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
