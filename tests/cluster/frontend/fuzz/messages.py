"""gRPC requests drawn by hypothesis, of all fields and any values: mostly broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from protos import lockstep_pb2 as pb
from tests.cluster.frontend.fuzz.requests import Values

T = TypeVar("T")

_VALUES: Mapping[int, Values] = {
    FieldDescriptor.TYPE_STRING: st.text(max_size=12),
    FieldDescriptor.TYPE_DOUBLE: st.floats(-2, 2) | st.floats(),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_INT32: st.integers(0, 8) | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(0, 8) | st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: st.integers(2, 250) | st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_ENUM: st.integers(0, 3),
}


def _message(kind: Descriptor, make: Callable[..., T]) -> st.SearchStrategy[T]:
    """Messages with some of their fields, each with any value that its type can hold."""
    fields = {field.name: _field(field) for field in kind.fields}
    return st.sets(st.sampled_from(sorted(fields)), max_size=8).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names}).map(
            lambda given: make(**given)
        )
    )


def _field(field: FieldDescriptor) -> Values:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = (_field(kind.fields_by_name[name]) for name in ("key", "value"))
        return st.dictionaries(key, value, max_size=4)
    one = _VALUES[field.type] if kind is None else _message(kind, getattr(pb, kind.name))
    return st.lists(one, max_size=4) if field.is_repeated else one


ANY = _message(pb.GenerateRequest.DESCRIPTOR, pb.GenerateRequest)
"""Requests of any values, mostly broken."""
