"""Messages as bytes, for the line between the processes of one cluster.

Pickle, but the frozen dataclasses with slots that make up most of a message go as their class and
the tuple of their fields: Python's own way restores each of them field by field in Python code.
Only for peers that are trusted, as with all of pickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from cluster.pool import protocol
from scheduler import messages


def _by_fields(cls: type) -> Callable[[Any], tuple[type, tuple[Any, ...]]]:
    names = [field.name for field in fields(cls)]
    if len(names) > 1:
        values = attrgetter(*names)
        return lambda item: (cls, values(item))
    return lambda item: (cls, tuple(getattr(item, name) for name in names))


_BY_FIELDS: dict[type, Callable[[Any], tuple[type, tuple[Any, ...]]]] = {
    cls: _by_fields(cls)
    for module in (messages, protocol)
    for cls in vars(module).values()
    if isinstance(cls, type) and is_dataclass(cls)
}


def pack(item: object) -> bytes:
    """Raises what pickle raises for an item that cannot be sent."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = _BY_FIELDS
    pickler.dump(item)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The item again, equal to what was packed. Never for bytes of a stranger."""
    return pickle.loads(data)
