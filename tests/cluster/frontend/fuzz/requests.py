"""Requests drawn by hypothesis. Over HTTP of all fields that the server's own models have:

*Well-formed*: within the ranges of each field, and sound as a whole. *Broken*: a
drawn request in which something is replaced, left out, added or cut off, or in another encoding, or
any JSON, or any bytes. *Odd*: any method, path and headers. These may still be sound by chance.

Over gRPC of all fields and any values, which are mostly broken, and well-formed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import hypothesis
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from cluster.frontend.http_api.bodies import ChatRequest, Known, taken
from cluster.frontend.http_api.bodies.messages import CountTokens, MessagesRequest
from cluster.frontend.http_api.bodies.openapi import BODIES
from cluster.frontend.http_api.bodies.responses import ResponsesRequest
from protos import lockstep_pb2 as pb
from scheduler.errors import InvalidRequest

T = TypeVar("T")
Values = st.SearchStrategy[Any]
Kind = type[Known]
KINDS: Mapping[Kind, str] = {kind: path for path, (kind, _) in BODIES.items()}
"""The path of each."""


class Asked(NamedTuple):
    """One request over HTTP."""

    path: str
    body: bytes
    method: str = "POST"
    headers: Mapping[str, str] = {}


def drawn(values: st.SearchStrategy[T], count: int, seed: int) -> list[T]:
    """So many of them, the same for the same seed."""
    found: list[T] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(values)
    def take(one: T) -> None:
        found.append(one)

    take()
    assert len(found) >= count, f"{len(found)} of {count} could be drawn"
    return found[:count]


# --------------------------------------------------------------------------- JSON

ANY_TEXT = st.text(st.characters(), max_size=12)
"""Half surrogate pairs too."""
EDGES = st.sampled_from(
    [
        *(2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, -1, 0),
        *(1e39, -1e39, 3.5e38, 1e308, 1e400, 1e-46, 1e-320, -0.0, float("nan")),
        *("", "null", "x" * 5000, "\ud800", [], {}, [2**63], [2**64], {"9" * 5000: 1}),
        *({str(2**64): 1}, {"5": 1e39}, {"x" * 5000: "x"}, [[[[]]]]),
    ]
)
"""Just within and just without what numbers, texts and lists hold somewhere on the way."""
ANY_JSON: Values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | ANY_TEXT | EDGES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=8,
)
TEXT = st.text(min_size=1, max_size=12)
IDS = st.lists(st.integers(2, 250), min_size=1, max_size=8)
STRUCTURES = ["[a-c]{1,4}", "yes|no"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def _without_names(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: turn[name] for name in ("role", "content")} for turn in turns]


RANGES: dict[str, Values] = {
    "model": st.just("tiny"),
    "prompt": TEXT | IDS | st.lists(TEXT | IDS, min_size=1, max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT},
            optional={"name": TEXT},
        ),
        min_size=1,
        max_size=4,
    ),
    "tools": st.just([TOOL]),
    "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "chat_template_kwargs": st.just({"answer": 42}),
    "n": st.integers(1, 3),
    "max_tokens": st.integers(1, 8),
    "max_completion_tokens": st.integers(1, 8),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.05, 1),
    "top_k": st.integers(-1, 50),
    "min_p": st.floats(0, 0.9),
    "seed": st.integers(0, 2**62),
    "stop": TEXT | st.lists(TEXT, max_size=4),
    "stop_token_ids": IDS,
    "logit_bias": st.dictionaries(st.integers(2, 250).map(str), st.floats(-100, 100), max_size=4),
    "repetition_penalty": st.floats(0.5, 2),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "min_tokens": st.just(1),
    "bad_words": st.lists(st.sampled_from(["fox", "dog", " the"]), max_size=3),
    "response_format": st.sampled_from(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        ]
    ),
    "structured_outputs": st.sampled_from(
        [{"regex": STRUCTURES[0]}, {"choice": ["yes", "no"]}, {"json": SCHEMA}]
    ),
    "logprobs": st.integers(0, 5),
    "top_logprobs": st.integers(0, 5),
    "prompt_logprobs": st.integers(0, 5),
    "committed_token_ids": IDS,
    "priority": st.sampled_from(["high", "normal", "low"]),
    "tokens": IDS,
    "allowed_token_ids": IDS,
    "logprob_token_ids": IDS,
    "truncate_prompt_tokens": st.integers(-1, 5).filter(bool),
    "truncation_side": st.sampled_from(["left", "right"]),
    "documents": st.just([{"title": "x", "text": "y"}]),
    "input_ids": IDS,
    "kv_transfer_params": IDS.map(lambda ids: {"prompt_token_ids": ids}),
    "chat_template": st.just("{{ messages[0].content }}"),
    "guided_json": st.just(SCHEMA),
    "guided_regex": st.just(STRUCTURES[0]),
    "guided_choice": st.just(["yes", "no"]),
    "guided_grammar": st.just('start: "yes" | "no"'),
    "json_schema": st.just(SCHEMA),
    "regex": st.just(STRUCTURES[1]),
    "ebnf": st.just('root ::= "yes" | "no"'),
    "functions": st.just([TOOL["function"]]),
    "function_call": st.sampled_from(["none", "auto"]),
    "reasoning_effort": st.sampled_from(["none", "low", "high"]),
    "thinking_token_budget": st.integers(1, 8),
}
RANGES |= {
    name: st.booleans()
    for name in (
        *("stream", "ignore_eos", "echo", "return_token_ids", "parallel_tool_calls"),
        *("add_special_tokens", "return_token_strs", "include_stop_str_in_output"),
        *("skip_special_tokens", "return_tokens_as_token_ids"),
        *("add_generation_prompt", "continue_final_message"),
        *("speculative_decoding_stats", "guided_json_object"),
        *("enable_thinking", "include_reasoning", "separate_reasoning", "stream_reasoning"),
    )
}
RANGES |= dict.fromkeys(("user", "cache_salt"), TEXT)
RANGES |= {"stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()})}
"""Sound values of each field of each request."""
RANGES |= {
    "input": TEXT | RANGES["messages"].map(_without_names),
    "instructions": TEXT,
    "system": TEXT,
    "previous_response_id": st.none(),
    "background": st.just(False),
    "max_output_tokens": st.integers(1, 8),
    "include": st.just(["message.output_text.logprobs"]),
    "text": st.sampled_from([{"format": {"type": "text"}}, {"format": {"type": "json_object"}}]),
    "reasoning": st.just({"effort": "low"}),
    "metadata": st.just({"a": "b"}),
    "stop_sequences": st.lists(TEXT, max_size=4),
    "thinking": st.just({"type": "disabled"}),
    "output_config": st.just({"effort": "low"}),
}
RANGES |= dict.fromkeys(("store", "enable_response_messages"), st.booleans())
_OF_MESSAGES: Mapping[str, Values] = {
    "messages": RANGES["messages"].map(_without_names),
    "tools": st.just([{"name": "look", "input_schema": SCHEMA}]),
    "tool_choice": st.sampled_from([{"type": "none"}, {"type": "auto"}]),
}
OWN: Mapping[Kind, Mapping[str, Values]] = {
    ChatRequest: {"logprobs": st.booleans()},
    ResponsesRequest: {
        "tools": st.just([{"type": "function"} | TOOL["function"]]),
    },
    MessagesRequest: _OF_MESSAGES,
    CountTokens: _OF_MESSAGES,
}
"""Of fields that are another thing elsewhere."""


BOUND_BY = ("tools", "functions", "response_format", "structured_outputs")
BOUND_BY += ("text", "json_schema", "regex", "ebnf", "guided_json_object")
BOUND_BY += ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Each says what the text must be."""
NOT_WITH_A_STRUCTURE = ("ignore_eos", "committed_token_ids", "min_tokens", "bad_words")
NOT_WITH_A_STRUCTURE += ("allowed_token_ids",)


def requests_of(kind: Kind) -> Values:
    """Fields of one request, each sound by itself."""
    fields = {name: RANGES[name] for name in kind.model_fields} | OWN.get(kind, {})
    needed = {name for name, field in kind.model_fields.items() if field.is_required()}
    others = sorted(fields.keys() - needed)
    return st.sets(st.sampled_from(others), max_size=8).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in needed | names})
    )


def well_formed(kind: Kind) -> Values:
    """Those that are to be answered."""
    calls = "max_tokens" in kind.model_fields

    def sound(fields: dict[str, Any]) -> bool:
        try:
            taken(kind, fields)
        except InvalidRequest:
            return False
        bound = sum(name in fields for name in BOUND_BY)
        continued = bool(fields.get("committed_token_ids"))
        several = fields.get("n", 1) > 1 or isinstance(fields.get("prompt"), list)
        asked = fields.get("logprobs")
        return bound < 2 and not (
            ("allowed_token_ids" in fields and "bad_words" in fields)
            or ("logprob_token_ids" in fields and asked in (None, False))
            or "chat_template" in fields
            or "thinking_token_budget" in fields
            or ("function_call" in fields and "functions" not in fields)
            or ({"function_call", "tool_choice"} <= fields.keys())
            or (bound and any(fields.get(name) for name in NOT_WITH_A_STRUCTURE))
            or (continued and (several or "seed" not in fields or fields.get("max_tokens", 0) < 8))
            or (fields.get("tool_choice") == "required" and "tools" not in fields)
        )

    def short(fields: dict[str, Any]) -> dict[str, Any]:
        given = fields.keys() & {"max_tokens", "max_completion_tokens"}
        return fields if given or not calls else fields | {"max_tokens": 8}

    return requests_of(kind).map(short).filter(sound)


def _places(value: Any) -> Iterator[tuple[str | int, ...]]:
    """The way to each value inside this one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, each in inner:
        yield (name,)
        if isinstance(each, dict | list):
            yield from ((name, *rest) for rest in _places(each))


def _with(fields: dict[str, Any], place: Sequence[str | int], value: Any) -> dict[str, Any]:
    """A copy with this value there."""
    found = copy.deepcopy(fields)
    inner: Any = found
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return found


def _broken(fields: dict[str, Any], every: Sequence[str]) -> Values:
    """As JSON text, or a part of it. `every`: names of all fields."""
    names = sorted(fields) or every
    places = list(_places(fields)) or [(names[0],)]
    ways: list[Values] = [
        st.builds(lambda name, value: fields | {name: value}, st.sampled_from(names), ANY_JSON),
        st.builds(lambda name, value: fields | {name: value}, st.sampled_from(every), EDGES),
        st.builds(lambda name, value: fields | {name: value}, ANY_TEXT, ANY_JSON),
        st.builds(_with, st.just(fields), st.sampled_from(places), ANY_TEXT | ANY_JSON | EDGES),
        st.sampled_from(names).map(
            lambda left: {name: value for name, value in fields.items() if name != left}
        ),
    ]
    whole = st.one_of(ways)
    plain = whole.map(lambda found: json.dumps(found).encode())
    text = json.dumps(fields).encode()
    cut = st.integers(0, len(text) - 1).map(lambda size: text[:size])
    return plain | st.builds(_as_it_is, whole, ENCODINGS) | cut


ENCODINGS = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-le"])


def _as_it_is(value: Any, encoding: str) -> bytes:
    """JSON without escapes: half a surrogate pair is bytes that no such text has."""
    return json.dumps(value, ensure_ascii=False).encode(encoding, "surrogatepass")


def broken(kind: Kind) -> Values:
    """Bodies of requests with something wrong."""
    anything = ANY_JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40)
    every = sorted(kind.model_fields)
    return requests_of(kind).flatmap(lambda fields: _broken(fields, every)) | anything


_LATIN = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=12)
_EVENT = st.builds(
    "cmpl-{}:{}:{}".format,
    st.just("0" * 32),
    st.integers(0, 2**64) | st.integers(-9, 9),
    st.from_regex(r"[0-9]{1,9}e?(,1)?(:usage)?", fullmatch=True) | st.just("9" * 5000),
)
_READ: Mapping[str, Values] = {
    "x-request-id": _LATIN | st.just("x" * 5000),
    "last-event-id": _EVENT | _LATIN,
    "accept": _LATIN,
}
"""Headers that decide nothing but what an answer is."""
_CHECKED: Mapping[str, Values] = {
    "content-type": st.sampled_from(["application/json;", "application/json; charset=latin-1"]),
    "host": _LATIN | st.sampled_from(["localhost", "[::1", "[::1]:99999999", "evil.example"]),
    "origin": _LATIN | st.sampled_from(["null", "http://[x", "http://localhost"]),
    "authorization": _LATIN | st.just("Bearer"),
    "x-forwarded-for": _LATIN,
}
_PATHS = [*KINDS.values(), "/v1/models", "/v1/models/", "/v1/models/tiny", "/v1/nothing", "/", "//"]
_PATHS += ["/health", "/healthz", "/readyz", "/version", "/v1/completions/"]
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "NOTHING", ""]


def odd() -> st.SearchStrategy[Asked]:
    """Half of them sound streams with headers that are read."""
    fields = {"model": "tiny", "prompt": "x", "max_tokens": 4, "stream": True}
    streamed = json.dumps(fields).encode()
    some = st.fixed_dictionaries({}, optional=_READ)
    streams = st.builds(Asked, st.just("/v1/completions"), st.just(streamed), headers=some)
    paths = st.sampled_from(_PATHS) | _LATIN.map(lambda name: f"/{name}")
    body = st.sampled_from([b"", b"{}", streamed])
    every = st.fixed_dictionaries({}, optional={**_READ, **_CHECKED})
    return streams | st.builds(Asked, paths, body, st.sampled_from(_METHODS), every)


# --------------------------------------------------------------------------- gRPC


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


MESSAGE = _message(pb.GenerateRequest.DESCRIPTOR, pb.GenerateRequest)
"""Requests of any values, mostly broken."""


_TOOLS = {"tools": st.just([{"name": "look", "parameters": json.dumps(SCHEMA)}])}
_PROMPTS: Values = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT}),
    IDS.map(lambda ids: {"prompt_token_ids": {"ids": ids}}),
    st.fixed_dictionaries({"messages": RANGES["messages"]}, optional=_TOOLS),
)
_ALONE: Values = st.one_of(
    st.fixed_dictionaries(
        {}, optional={name: RANGES[name] for name in ("ignore_eos", "min_tokens", "bad_words", "n")}
    ),
    IDS.map(lambda ids: {"committed_token_ids": ids}),
    st.sampled_from(STRUCTURES).map(lambda regex: {"regex": regex, "n": 2}),
    st.sampled_from([{"choice": {"texts": ["yes", "no"]}}, {"json_schema": json.dumps(SCHEMA)}]),
)
"""What goes together with none of the others."""
_SAME = ("temperature", "top_p", "min_p", "stop_token_ids", "repetition_penalty", "logprobs")
_SAME += ("frequency_penalty", "presence_penalty", "prompt_logprobs", "parallel_tool_calls", "stop")
_REST = {name: RANGES[name] for name in (*_SAME, "cache_salt")} | {
    "top_k": st.integers(0, 50),
    "logit_bias": st.dictionaries(st.integers(2, 250), st.floats(-100, 100), max_size=4),
    "priority": st.integers(0, 3),
    "speculation": st.booleans(),
    "draft_len": st.integers(0, 4),
    "request_id": TEXT,
}
SOUND = st.builds(
    lambda prompt, alone, rest: pb.GenerateRequest(**prompt, **alone, **rest, max_new_tokens=8),
    _PROMPTS,
    _ALONE,
    st.fixed_dictionaries({"seed": RANGES["seed"]}, optional=_REST),
)
"""Those that are to be answered."""
