"""gRPC requests drawn by hypothesis: of any values, mostly broken, and well-formed ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from protos import lockstep_pb2 as pb
from tests.cluster.frontend.fuzz.requests import IDS, RANGES, SCHEMA, STRUCTURES, TEXT, Values

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


_TOOLS = {"tools": st.just([{"name": "look", "parameters": json.dumps(SCHEMA)}])}
_PROMPTS: Values = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT}),
    st.fixed_dictionaries({"prompt_token_ids": IDS.map(lambda ids: {"ids": ids})}),
    st.fixed_dictionaries({"messages": RANGES["messages"]}, optional=_TOOLS),
)
_NAMES = ("ignore_eos", "min_tokens", "bad_words", "n")
_FREE = {"ignore_eos": st.booleans()} | {name: RANGES[name] for name in _NAMES[1:]}
_KINDS: Values = st.one_of(
    st.fixed_dictionaries({}, optional=_FREE),
    st.fixed_dictionaries({"committed_token_ids": IDS}),
    st.fixed_dictionaries({"regex": st.sampled_from(STRUCTURES)}, optional={"n": RANGES["n"]}),
    st.just({"choice": {"texts": ["yes", "no"]}}),
    st.just({"json_schema": json.dumps(SCHEMA)}),
)
_SAME = ("temperature", "top_p", "min_p", "stop_token_ids", "repetition_penalty", "logprobs")
_SAME += ("frequency_penalty", "presence_penalty", "prompt_logprobs")
_OTHERS = {name: RANGES[name] for name in _SAME} | {
    "top_k": st.integers(0, 50),
    "stop": st.lists(TEXT, max_size=4),
    "logit_bias": st.dictionaries(st.integers(2, 250), st.floats(-100, 100), max_size=4),
    "priority": st.integers(0, 3),
    "speculation": st.booleans(),
    "draft_len": st.integers(0, 4),
    "parallel_tool_calls": st.booleans(),
    "request_id": TEXT,
    "cache_salt": TEXT,
}
_ALWAYS = {"seed": RANGES["seed"], "max_new_tokens": st.just(8)}
WELL_FORMED = st.builds(
    lambda *parts: pb.GenerateRequest(**{name: of for part in parts for name, of in part.items()}),
    _PROMPTS,
    _KINDS,
    st.fixed_dictionaries(_ALWAYS, optional=_OTHERS),
)
"""Those that are to be answered."""
