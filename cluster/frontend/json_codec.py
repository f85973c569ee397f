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
"""Of a long array in one piece, where an item has few values. With 20 likeliest tokens each takes
some 60 us to write."""
_VALUES = 2048
"""Of all items in one piece, and of an object that is not long."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LongArray:
    """Stands for a JSON array whose values are made as it is written, and not kept."""

    items: Sequence[Any]
    value: Callable[[Any], Any]
    """Of an item."""
    at_once: int = _ITEMS
    """Items in one piece. If they are fewer than others have, they may hold long arrays."""


def json_array(
    items: Sequence[_T], value: Callable[[_T], Any], size: int = 1
) -> list[Any] | LongArray:
    """A plain list, if it is short. `size`: about so many values are in one of the items."""
    at_once = max(min(_ITEMS, _VALUES // size), 1)
    if len(items) <= at_once and size <= _VALUES:
        return [value(item) for item in items]
    return LongArray(items, value, at_once)


def json_pieces(value: Any) -> Iterator[str]:
    """The text of a value that may hold long arrays: in fields, and in objects that lists hold."""
    if isinstance(value, LongArray):
        yield "["
        for at in range(0, len(value.items), value.at_once):
            made = [value.value(item) for item in value.items[at : at + value.at_once]]
            yield "," * (at > 0)
            if value.at_once == _ITEMS:
                yield _text(made)[1:-1]
                continue
            for number, item in enumerate(made):
                yield "," * (number > 0)
                yield from json_pieces(item)
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
        return len(value) > _VALUES or any(map(_is_long, value.values()))
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
