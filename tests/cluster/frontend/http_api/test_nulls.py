"""Proves: null in place of a field asks for nothing, wherever the field stands; in a JSON schema
and in what a template is told null is a value.
"""

from __future__ import annotations

from typing import Any

from tests.cluster.frontend.http_api.test_openai import events, post
from tests.cluster.frontend.http_api.test_openai_decoding import served
from tests.cluster.frontend.http_api.test_tokens_api import post as post_tokens
from tests.cluster.frontend.tools.test_tools import ASKED, HERMES_TEMPLATE, served_with

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TURN = {"role": "assistant", "content": "", "tool_calls": [CALL]}
NULL = {"type": "function", "function": {"name": "look", "parameters": {"const": None}}}
PLAIN: dict[str, Any] = {
    "messages": [*ASKED, TURN],
    "tools": [NULL],
    "max_tokens": 20,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
UNSET: dict[str, Any] = PLAIN | {
    "messages": [*ASKED, TURN | {"refusal": None, "tool_calls": [CALL | {"index": None}]}],
    "tools": [NULL | {"function": NULL["function"] | {"strict": None, "description": None}}],
    "response_format": {"type": "text", "json_schema": None},
    "stream_options": {"include_usage": True, "include_obfuscation": None},
}


async def test_null_is_a_field_that_is_not_there() -> None:
    async with served_with(HERMES_TEMPLATE) as (_made, app):
        told = []
        for fields in (PLAIN, UNSET):
            *chunks, last = events(await post(app, "chat/completions", **fields))
            said = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
            asked = {name: fields[name] for name in ("messages", "tools")}
            tokens = (await post_tokens(app, "/tokenize", **asked)).json["tokens"]
            assert last["usage"]["prompt_tokens"] == len(tokens)
            told.append(("".join(said), tokens))
        assert told[0] == told[1]


async def test_null_is_a_value_where_names_are_the_clients_own() -> None:
    async with served() as (_made, app):
        schema = {"name": "x", "strict": None, "schema": {"const": None}}
        for shape in (
            {"response_format": {"type": "json_schema", "json_schema": schema}},
            {"structured_outputs": {"json": {"const": None}, "regex": None}},
        ):
            answer = await post(app, "completions", prompt="x = ", max_tokens=20, **shape)
            assert answer.json["choices"][0]["text"] == "null"
    template = "{% if style is defined and style is none %}x{% endif %}{{ messages[0].content }}"
    async with served_with(template) as (_made, app):
        said = [
            await post_tokens(app, "/tokenize", messages=ASKED, chat_template_kwargs=options)
            for options in ({}, {"style": None})
        ]
        assert said[0].json["count"] < said[1].json["count"]
