"""Structures drawn by hypothesis from a grammar of grammars: JSON schemas, regular expressions,
Lark and choices, sound and broken, small and at the edge of what is served, nested in each other.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.cluster.frontend.fuzz.requests import Asked, Values

_NAMES = st.sampled_from(["a", "b", "key", "x y", "é", "", "a" * 60])
_SMALL = st.integers(0, 6)
_SIZES = _SMALL | st.sampled_from([40, 500, 3000])
_NUMBERS = st.integers(-1000, 1000) | st.sampled_from([0, 1e-9, 0.1, 400009, 1500007, 10**18])

# --------------------------------------------------------------------------- regular expressions

_ATOMS = st.sampled_from(
    ["a", "b", "[a-z]", "[^x]", ".", r"\d", r"\w", r"\s", "é", r"\x41", "(?i:ab)", "[😀-😂]"]
) | st.sampled_from(["(?=a)", r"\1", "[", "(", "a{3,1}", "$", "^", r"\b", ""])
_REPEATS = st.sampled_from(["", "*", "+", "?", "{2}", "{0,9}", "{1,200}", "{1000}", "*?", "{,}"])
REGEXES: st.SearchStrategy[str] = st.recursive(
    st.builds(str.__add__, _ATOMS, _REPEATS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=4).map(lambda parts: f"({'|'.join(parts)})"),
        st.builds("({}){}".format, inner, _REPEATS),
    ),
    max_leaves=8,
)

# --------------------------------------------------------------------------- JSON schemas

_PLAIN: Values = st.one_of(
    st.sampled_from(
        [True, {}, {"type": "null"}, {"type": "boolean"}, {"const": 1}, {"type": "nothing"}]
    ),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "minLength": _SIZES,
            "maxLength": _SIZES,
            "pattern": REGEXES,
            "format": st.sampled_from(["date-time", "uuid", "email", "ipv6", "nothing"]),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={"minimum": _NUMBERS, "maximum": _NUMBERS, "multipleOf": _NUMBERS},
    ),
    st.lists(st.text(max_size=6) | _NUMBERS | st.none(), max_size=5).map(lambda of: {"enum": of}),
    _SIZES.map(lambda count: {"enum": [f"option {number}" for number in range(count)]}),
    st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/nothing"]).map(lambda to: {"$ref": to}),
)


def _within(inner: Values) -> Values:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(_NAMES, inner, max_size=4)},
            optional={
                "required": st.lists(_NAMES, max_size=3),
                "additionalProperties": st.booleans() | inner,
            },
        ),
        st.builds(
            lambda count, of: {
                "type": "object",
                "properties": {f"k{number}": of for number in range(count)},
            },
            st.sampled_from([30, 600]),
            inner,
        ),
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner},
            optional={"minItems": _SIZES, "maxItems": _SIZES, "prefixItems": several},
        ),
        st.builds(lambda way, of: {way: of}, st.sampled_from(["anyOf", "oneOf", "allOf"]), several),
        inner.map(lambda of: {"not": of}),
    )


_SCHEMAS = st.recursive(_PLAIN, _within, max_leaves=6)
SCHEMAS = st.builds(
    lambda schema, a, b: (
        schema | {"$defs": {"a": a, "b": b}} if isinstance(schema, dict) else schema
    ),
    _SCHEMAS,
    _SCHEMAS,
    _SCHEMAS,
)

# --------------------------------------------------------------------------- Lark

_RULES = ("start", "e", "f")
_SYMBOLS = st.sampled_from(
    [*_RULES, "T", '"a"', '"b"', '""', '"é"', "/[a-c]+/", "unknown", "<|end|>"]
)
_SIDES = st.lists(_SYMBOLS, max_size=4).map(" ".join)
_BODIES = st.lists(_SIDES, min_size=1, max_size=4).map(" | ".join)
LARKS = st.builds(
    lambda bodies, terminal, more: "\n".join(
        [
            *(f"{name}: {body}" for name, body in zip(_RULES, bodies, strict=True)),
            f"T: {terminal}",
            more,
        ]
    ),
    st.tuples(_BODIES, _BODIES, _BODIES),
    st.sampled_from(['"x"', "/[x-z]{1,9}/", "/x*/", '"x" T', "("]),
    st.sampled_from(["", "%ignore / +/", "%import common.INT", "start: "]),
) | st.text(max_size=20)

# --------------------------------------------------------------------------- requests

_CHOICES = st.lists(st.text(max_size=9), max_size=6) | _SIZES.map(
    lambda count: [f"choice {number}" for number in range(count)]
)
STRUCTURED: Values = st.one_of(
    st.fixed_dictionaries({"json": SCHEMAS}),
    st.fixed_dictionaries({"regex": REGEXES}),
    st.fixed_dictionaries({"grammar": LARKS}),
    st.fixed_dictionaries({"choice": _CHOICES}),
)


def _asked(structure: dict[str, Any], rest: dict[str, Any]) -> Asked:
    fields = {"model": "tiny", "prompt": "x", "structured_outputs": structure} | rest
    return Asked("/v1/completions", json.dumps(fields).encode())


ASKED = st.builds(
    _asked,
    STRUCTURED,
    st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 16)},
        optional={
            "temperature": st.sampled_from([0.0, 1.0]),
            "seed": st.just(5),
            "n": st.integers(1, 2),
            "stream": st.booleans(),
            "repetition_penalty": st.sampled_from([1.0, 1.5, 1e38]),
        },
    ),
)
"""Requests with a structure; most are answered, the others refused."""
