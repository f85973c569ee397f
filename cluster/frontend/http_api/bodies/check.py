"""Checks a body by the table of parameters and by its endpoint's model.

An unknown name that is near a known one is taken for a typing error, and refused. Any other has no
effect: the answer names it in a header, and the log once a minute.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import ConfigDict, ValidationInfo, model_validator

from cluster.error_messages import Strict, did_you_mean, validated
from cluster.frontend.http_api.bodies.parameters import PARAMETERS, TOPS, Kind

log = logging.getLogger("lockstep.frontend")

IGNORED_HEADER = "x-lockstep-ignored"
_TOLD_MAX = 16
"""Names in a header or a line of the log."""
_NAMES_MAX = 1024
"""Names that one body may have without effect."""
_PLAIN = re.compile(r"[\w.-]{1,64}", re.ASCII)
_TYPING_ERROR = 0.8
"""How near a name must be to a known one, from 0 to 1."""
_EVERY_S = 60.0

_OWN_NULLS = {"parameters", "schema", "json", "chat_template_kwargs", "logit_bias"}
"""Objects whose names are the client's own: there a null is a value."""

_K = TypeVar("_K", bound="Known")


class Names:
    """The names without effect that one body has."""

    def __init__(self, refuse_unknown: bool) -> None:
        self.refuse_unknown = refuse_unknown
        self.ignored: dict[str, None] = {}


def _described(schema: dict[str, Any], model: type[Any]) -> None:
    """In the OpenAPI document."""
    if model.open_to_unknown:
        schema["additionalProperties"] = True


class Known(Strict):
    """An object of a body: takes its own fields, and the names that the table lets pass."""

    model_config = ConfigDict(json_schema_extra=_described)
    place: ClassVar[str] = ""
    """Of its names in the table, with a point behind it."""
    open_to_unknown: ClassVar[bool] = True

    @model_validator(mode="before")
    @classmethod
    def _own_fields(cls, given: Any, info: ValidationInfo) -> Any:
        """Without a context, as over gRPC, all other names are refused."""
        names = info.context
        if not isinstance(given, dict) or not isinstance(names, Names):
            return given
        own = _own_names(cls)
        if given.keys() <= own:
            return given
        return {
            name: given[name]
            for name in given
            if name in own or cls._stays(names, name, given[name])
        }

    @classmethod
    def _stays(cls, names: Names, name: str, value: Any) -> bool:
        """Whether a name that is no field stays, for the model to refuse it. Raises ValueError for
        one that is not supported."""
        parameter = PARAMETERS.get(cls.place + name)
        if parameter is None and cls.place in TOPS:
            parameter = PARAMETERS.get(name)
        if parameter is not None:
            if parameter.kind is Kind.SUPPORTED:
                raise ValueError(f"{name}: not a parameter of this request")
            if parameter.kind is Kind.REFUSED and value not in parameter.neutral:
                raise ValueError(f"{name}: not supported: {parameter.about}")
            return False
        if names.refuse_unknown or not cls.open_to_unknown:
            return True
        if did_you_mean(name, _own_names(cls), _TYPING_ERROR):
            return True
        names.ignored[cls.place + name] = None
        if len(names.ignored) > _NAMES_MAX:
            raise ValueError(f"more than {_NAMES_MAX} unknown names")
        return False


@cache
def _own_names(model: type[Known]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class Taken(NamedTuple):
    """A body that was checked."""

    body: Any
    ignored: list[str]
    """Names that have no effect, and that the table does not know."""

    @property
    def headers(self) -> dict[str, str]:
        return {IGNORED_HEADER: _told(self.ignored)} if self.ignored else {}


def taken(model: type[_K], fields: dict[str, Any], refuse_unknown: bool = False) -> Taken:
    """Raises InvalidRequest, which names the parameter."""
    names = Names(refuse_unknown)
    body = validated(model, without_nulls(fields), names)
    return Taken(body, list(names.ignored))


def without_nulls(value: Any) -> Any:
    """Clients send fields that they leave unset as null, and turns back with all their fields."""
    if isinstance(value, list):
        return [without_nulls(item) if isinstance(item, dict | list) else item for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: inner if name in _OWN_NULLS else without_nulls(inner)
        for name, inner in value.items()
        if inner is not None
    }


def _told(names: Iterable[str]) -> str:
    """As a header may hold them."""
    plain = [name if _PLAIN.fullmatch(name) else "?" for name in names]
    return ", ".join(plain[:_TOLD_MAX] + ["..."] * (len(plain) > _TOLD_MAX))


class IgnoredNames:
    """Tells the log of names without effect, once a minute at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._names: dict[str, None] = {}
        self._next_s = -float("inf")

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self._names) <= _TOLD_MAX:
                self._names[name] = None
        now_s = self._clock()
        if self._names and now_s >= self._next_s:
            log.warning("unknown names in requests have no effect: %s", _told(self._names))
            self._names.clear()
            self._next_s = now_s + _EVERY_S
