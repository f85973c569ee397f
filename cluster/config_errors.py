"""What is wrong with settings, in sentences that name the field, the value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize, ValidationError
from pydantic.fields import FieldInfo


def problems(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """For each problem the setting's path, as "replica.dtype", and what is wrong with it."""
    for item in error.errors():
        path = tuple(map(str, item["loc"]))
        yield ".".join(path), _reason(dict(item), path, model)


def _reason(item: dict[str, Any], path: tuple[str, ...], model: type[BaseModel]) -> str:
    if item["type"] in ("value_error", "assertion_error"):
        return str(item["msg"]).split(", ", 1)[1]
    if item["type"] == "extra_forbidden":
        names = _settings_at(path[:-1], model)
        near = difflib.get_close_matches(path[-1], names, 1)
        return "no such setting" + (f"; did you mean {near[0]}?" if near else "")
    if item["type"] == "missing":
        return "is needed"
    field = field_at(path, model)
    if field is None:
        return f"{item['msg']}, is {item['input']!r}"
    return f"must be {allowed(field)}, is {item['input']!r}"


def field_at(path: tuple[str, ...], model: type[BaseModel]) -> FieldInfo | None:
    """The field of a setting, through sections; None where the path leads elsewhere."""
    field = None
    inner: type[BaseModel] | None = model
    for name in path:
        field = inner.model_fields.get(name) if inner is not None else None
        if field is None:
            return None
        inner = model_of(field)
    return field


def _settings_at(path: tuple[str, ...], model: type[BaseModel]) -> list[str]:
    if not path:
        return list(model.model_fields)
    field = field_at(path, model)
    inner = model_of(field) if field is not None else None
    return list(inner.model_fields) if inner is not None else []


def type_of(field: FieldInfo) -> Any:
    """The type of a field without `| None`."""
    found = field.annotation
    if get_origin(found) in (Union, UnionType):
        found = next(each for each in get_args(found) if each is not type(None))
    return found


def model_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section of its own, else None."""
    found = type_of(field)
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def bounds(field: FieldInfo) -> str:
    """The range of a number: "from 1 to 8", "at least 1", "above 0" or nothing."""
    found: dict[str, Any] = {}
    for each in field.metadata:
        found |= {name: getattr(each, name) for name in ("ge", "gt", "le") if hasattr(each, name)}
    if "ge" in found and "le" in found:
        return f"from {found['ge']:g} to {found['le']:g}"
    said = {"ge": "at least", "gt": "above", "le": "at most"}
    return " and ".join(f"{said[name]} {value:g}" for name, value in found.items())


def allowed(field: FieldInfo) -> str:
    """What values a field takes."""
    found = type_of(field)
    null = " or null" if type(None) in get_args(field.annotation) else ""
    if get_origin(found) is Literal:
        return "one of " + ", ".join(map(str, get_args(found))) + null
    pattern = next((each.pattern for each in field.metadata if hasattr(each, "pattern")), None)
    if found is str:
        shown = f"a text that matches {pattern}" if pattern else "a text that is not empty"
        return shown + null + (f" ({field.description})" if pattern and field.description else "")
    if model_of(field) is not None:
        return "a mapping of settings" + null
    kinds = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        ByteSize: "a size as '20GiB' or in bytes",
    }
    range_ = "" if found is ByteSize else bounds(field)
    return " ".join(filter(None, (kinds.get(found, str(found)), range_))) + null
