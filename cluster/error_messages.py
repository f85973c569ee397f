"""What pydantic refuses, as sentences: the field, the value, and what is allowed."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from scheduler.errors import InvalidRequest

_M = TypeVar("_M", bound=BaseModel)
_RULES: Mapping[str, str] = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_too_short": "must have a character at least",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
}
"""By pydantic's type of error; filled in with its context."""
_PATTERNS: Mapping[str, str] = {
    r"^(auto|cpu|cuda(:\d+)?)$": "must be auto, cpu, cuda or cuda:N",
    "^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}$": "must be 1 to 64 of the characters a-z, A-Z, 0-9, '_', '.'"
    " and '-', the first a letter or a digit",
    "^[a-zA-Z0-9_.-]{1,64}$": "must be 1 to 64 of the characters a-z, A-Z, 0-9, '_', '.' and '-'",
    "^/": "must be an absolute path",
    "^(/[^/]+)*$": "must be empty or begin, but not end, with a slash",
    "^[0-9a-f]{64}$": "must be 64 hexadecimal digits",
}
"""What a text is that matches; people read no regular expressions."""
_KINDS: Mapping[str, str] = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be a text",
    "tuple": "must be a list",
    "list": "must be a list",
    "dict": "must be a mapping",
    "model": "must be a mapping",
    "finite": "must be a finite number",
    "byte": "must be a size in bytes, as 512MiB",
}
"""By the first word of the type of error."""
_VALUE_CHARS_MAX = 80


class Strict(BaseModel):
    """An object in a request: takes the fields that it names, of their own types, and no other."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def validated(model: type[_M], fields: dict[str, Any], context: object = None) -> _M:
    """Raises InvalidRequest, which names the field. `context`: for the model's own validators."""
    try:
        return model.model_validate(fields, context=context)
    except ValidationError as error:
        said = joined(problems(error, model, given=fields))
        field, colon, reason = said.partition(": ")
        raise InvalidRequest(field if colon else "request", reason or said) from None


def joined(found: Iterable[tuple[str, str]]) -> str:
    """A sentence for each place and what is wrong there, with semicolons between them."""
    # What concerns several fields has no place of its own.
    return "; ".join(": ".join(filter(None, each)) for each in found)


def problems(
    error: ValidationError,
    model: type[BaseModel],
    instead: Mapping[str, str] = MappingProxyType({}),
    values: bool = True,
    given: dict[str, Any] | None = None,
) -> tuple[tuple[str, str], ...]:
    """The place of each error, as "replica.dtype", and what is wrong there.

    `model`: what was validated, or a list of it. `instead`: by the places of unknown
    names, what to use. `values`: whether wrong values and unknown names are shown. `given`: what
    was validated, needed where a place may hold one of several kinds of value: pydantic names the
    kind among the place's parts, and says of each kind why the value is none of it.
    """
    found: dict[tuple[str | int, ...], dict[str, str]] = {}
    for item in error.errors():
        place = item["loc"] if given is None else _place(item["loc"], model, given)
        shown = f", is {shown_value(item['input'])}" if values else ""
        reason, is_rule = _reason(dict(item), place, model, instead)
        if not values and item["type"] == "extra_forbidden":
            place = (*place[:-1], "***")
        found.setdefault(place, {})[reason] = shown if is_rule else ""
    # Of a value of the right kind only what is wrong inside it is said.
    outer = {place[:length] for place in found for length in range(len(place))}
    return tuple(
        (".".join(map(str, place)), _either(reasons))
        for place, reasons in found.items()
        if place not in outer
    )


def _either(reasons: Mapping[str, str]) -> str:
    """One sentence of the reasons at one place, each with what follows it."""
    first, *others = reasons
    more = "".join(f" or {other.removeprefix('must be ')}" for other in others)
    return first + more + reasons[first]


def _place(loc: Sequence[str | int], model: type[BaseModel], given: Any) -> tuple[str | int, ...]:
    """Of these parts those that are a number, a field or a name that was given."""
    place: list[str | int] = []
    for part in loc:
        if (
            isinstance(part, int)
            or (isinstance(given, dict) and part in given)
            or part in _fields(model, place)
        ):
            place.append(part)
            try:
                given = given[part]
            except (TypeError, LookupError):
                given = None
    return tuple(place)


def did_you_mean(name: str, allowed: Iterable[str], nearness: float = 0.6) -> str:
    """A question with the nearest name, to stand behind a sentence; empty if none is near."""
    near = difflib.get_close_matches(name[:_VALUE_CHARS_MAX], list(allowed), n=1, cutoff=nearness)
    return f"; did you mean {near[0]}?" if near else ""


def shown_value(value: Any) -> str:
    """A wrong value as a sentence shows it: cut where it is long."""
    text = repr(value)
    return text if len(text) <= _VALUE_CHARS_MAX else text[:_VALUE_CHARS_MAX] + "..."


def _reason(
    item: dict[str, Any],
    place: Sequence[str | int],
    model: type[BaseModel],
    instead: Mapping[str, str],
) -> tuple[str, bool]:
    """What is wrong, and whether the value belongs behind it."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        if use := instead.get(".".join(map(str, place))):
            return f"unknown name; use {use}", False
        return "unknown name" + did_you_mean(str(place[-1]), _fields(model, place[:-1])), False
    if kind == "missing":
        return "must be given", False
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", item["msg"])), False
    rule = (
        _PATTERNS.get(context.get("pattern", ""))
        or _RULES.get(kind)
        or _KINDS.get(kind.partition("_")[0])
    )
    limits = {name: _whole(value) for name, value in context.items()}
    return rule.format(**limits) if rule else item["msg"], True


def _whole(value: Any) -> Any:
    """A limit without a fraction of zero."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _fields(model: type[BaseModel], place: Sequence[str | int]) -> Iterable[str]:
    """Names of the fields of the model at a place inside `model`."""
    for name in place:
        if isinstance(name, int):
            continue
        field = model.model_fields.get(name)
        inner = _models(field.annotation) if field else []
        if not inner:
            return ()
        model = inner[0]
    return [field.alias or name for name, field in model.model_fields.items()]


def _models(kind: Any) -> list[type[BaseModel]]:
    """Those in an annotation, however deep."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for inner in typing.get_args(kind) for model in _models(inner)]
