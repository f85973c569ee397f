"""Proves: calls are read out of a text in either format however it is cut into pieces, and what is
none stays text; with a real replica a required or strict call has the arguments that its schema
says, whole and streamed, and comes back to the template as it went; what cannot be is refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from grpc import StatusCode

from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.http_api.app import http_app
from cluster.frontend.tools import ToolFormat, ToolReader, tool_format
from protos import lockstep_pb2 as pb
from replicas.replica import Replica
from tests.cluster.frontend.rig import CONFIG, Context, frontend
from tests.cluster.frontend.test_openai import events, post
from tests.cluster.frontend.test_openai_decoding import PAIR, text

HERMES_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer with <tool_call>{...}</tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "\n</tool_call>{% endfor %}\n{% endfor %}assistant: "
)
LLAMA_TEMPLATE = HERMES_TEMPLATE.replace(
    "Answer with <tool_call>{...}</tool_call>", 'Answer with {"name": ..., "parameters": ...}'
).replace("<tool_call>", "")
SEVERAL_TEMPLATES = {
    "default": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
    "tool_use": HERMES_TEMPLATE,
}
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TIME = {"name": "time"}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, TIME)]
GRPC_TOOLS = [
    pb.Tool(name="weather", parameters=json.dumps(WEATHER["parameters"])),
    pb.Tool(name="time"),
]
ASKED = [{"role": "user", "content": "what is the weather?"}]

UNKNOWN = {"type": "function", "function": {"name": "x"}}
A_JSON = {"response_format": {"type": "json_object"}}

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'
ROME, NO_ARGUMENTS = ("weather", {"city": "Rome"}), ("time", {})
READ = [
    ("hermes", "just text < here", "just text < here", []),
    ("hermes", CALL, "", [ROME]),
    ("hermes", f"I look.\n{CALL}\n{CALL}\n", "I look.", [ROME, ROME]),
    ("hermes", f"{CALL} and more", "and more", [ROME]),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', "", [NO_ARGUMENTS]),
    ("hermes", CALL.removesuffix("</tool_call>"), "", [ROME]),
    ("hermes", "<tool_call>no json</tool_call> x", "<tool_call>no json</tool_call> x", []),
    ("hermes", "a <tool_c", "a <tool_c", []),
    ("llama", LLAMA, "", [ROME]),
    ("llama", f"{LLAMA}; {LLAMA}", "", [ROME, ROME]),
    ("llama", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama", "text {", "text {", []),
    ("llama", '{"name": "we', '{"name": "we', []),
]


@pytest.mark.parametrize(("form", "written", "content", "calls"), READ)
def test_calls_are_read_however_the_text_is_cut(
    form: str, written: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    rng = random.Random(0)
    for cuts in (0, 1, 2, 5, len(written)):
        at = sorted(rng.randrange(len(written) + 1) for _ in range(cuts))
        reader = ToolReader(ToolFormat(form), frozenset({"weather", "time"}))
        said, found = "", []
        for begin, end in zip([0, *at], [*at, len(written)], strict=True):
            piece, more = reader.push(written[begin:end])
            said, found = said + piece, found + more
        piece, more = reader.finish()
        said, found = said + piece, found + more
        assert said == content
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls


def test_a_template_says_its_format() -> None:
    assert tool_format(HERMES_TEMPLATE) is ToolFormat.HERMES
    assert tool_format(LLAMA_TEMPLATE) is ToolFormat.LLAMA
    assert tool_format("{{ messages }}") is tool_format(None) is None


@asynccontextmanager
async def templated(template: str | dict[str, str], replicas: int = 1) -> AsyncIterator[GrpcApi]:
    """A frontend of the tiny pair with this chat template."""
    encoder = copy(text().encoder)
    encoder.chat_template = template
    config = CONFIG.model_copy(update={"replica": PAIR})
    spoken, load = replace(text(), encoder=encoder), partial(Replica.load, PAIR)
    async with frontend(config=config, replicas=replicas, load=load, text=spoken) as made:
        yield made


def as_http(call: pb.ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


@pytest.mark.parametrize("template", [SEVERAL_TEMPLATES, LLAMA_TEMPLATE], ids=["hermes", "llama"])
async def test_calls_have_the_arguments_of_their_schema(template: str | dict[str, str]) -> None:
    async with templated(template) as made:
        app = http_app(made.service)
        fields: dict[str, Any] = {
            "messages": ASKED,
            "tools": TOOLS,
            "max_tokens": 60,
            "temperature": 1,
            "seed": 4,
            "parallel_tool_calls": False,
        }
        named = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", named):
            body = await post(app, "chat/completions", **fields, n=4, tool_choice=choice)
            choices = body.json["choices"]
            for one in choices:
                assert one["finish_reason"] == "tool_calls"
                assert one["message"]["content"] is None
                [call] = one["message"]["tool_calls"]
                given = json.loads(call["function"]["arguments"])
                assert choice == "required" or call["function"]["name"] == "weather"
                if call["function"]["name"] == "weather":
                    assert given["city"] in ("Rome", "Oslo")
                    assert given["days"] in (1, 2, 3)
        streamed = await post(app, "chat/completions", **fields, tool_choice=named, stream=True)
        deltas = [event["choices"][0]["delta"] for event in events(streamed)]
        [call_delta] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        assert call_delta[0]["function"] == choices[0]["message"]["tool_calls"][0]["function"]
        assert all(not delta.get("content") for delta in deltas)
        turn = choices[0]["message"]
        result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "5"}
        # gRPC gives the same calls, also in a stream that is continued from any of its chunks.
        asked = pb.GenerateRequest(
            messages=[pb.ChatMessage(**turn) for turn in ASKED],
            tools=GRPC_TOOLS,
            tool_name="weather",
            max_new_tokens=60,
            temperature=1,
            seed=4,
        )
        answer = await made.Generate(asked, Context())
        assert [as_http(call) for call in answer.tool_calls] == [call_delta[0]["function"]]
        assert not answer.text
        chunks = [chunk async for chunk in made.GenerateStream(asked, Context())]
        for done in range(len(chunks)):
            again = pb.GenerateRequest()
            again.CopyFrom(asked)
            for chunk in chunks[:done]:
                again.committed_token_ids.extend(chunk.token_ids)
            rest = [chunk async for chunk in made.GenerateStream(again, Context())]
            calls = [call for chunk in (*chunks[:done], *rest) for call in chunk.tool_calls]
            assert [as_http(call) for call in calls] == [call_delta[0]["function"]]
        came = pb.ToolCall(name="weather", arguments=call["function"]["arguments"], id="c")
        asked.messages.append(pb.ChatMessage(role="assistant", tool_calls=[came]))
        asked.messages.append(pb.ChatMessage(role="tool", content="5", tool_call_id="c"))
        asked.tool_mode = pb.TOOL_MODE_NONE
        more_over_grpc = await made.Generate(asked, Context())
        assert not more_over_grpc.tool_calls
        more = await post(
            app,
            "chat/completions",
            **(fields | {"messages": [*ASKED, turn, result], "tool_choice": "none"}),
        )
        assert more.json["choices"][0]["message"]["content"] == more_over_grpc.text
        # A strict tool binds what is called, but not whether.
        strict = [{"type": "function", "function": WEATHER | {"strict": True}}]
        free = await post(app, "chat/completions", **(fields | {"tools": strict}), n=4)
        for one in free.json["choices"]:
            for call in one["message"].get("tool_calls", []):
                assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": UNKNOWN}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": TOOLS, "tool_choice": "required", **A_JSON}, "response_format"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ],
)
async def test_what_cannot_be_is_refused_over_http(fields: dict[str, Any], param: str) -> None:
    async with templated(HERMES_TEMPLATE, replicas=0) as made:
        answer = await post(http_app(made.service), "chat/completions", messages=ASKED, **fields)
        assert answer.status == 400
        assert answer.error["param"] == param


A_CALL = [{"name": "f", "arguments": "[]"}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_mode": 2}, "tool_choice: no tools are given"),
        ({"tool_mode": 7, "tools": GRPC_TOOLS}, "tool_mode: 7 names no mode"),
        ({"tools": GRPC_TOOLS, "tool_name": "x"}, "tool_choice: 'x' is not among the tools"),
        ({"tools": [pb.Tool(name="a b")]}, "tools.0.name: must match"),
        ({"tools": [pb.Tool(name="a", parameters="x")]}, "tools.0.parameters: must be the text"),
        ({"tools": GRPC_TOOLS, "tool_mode": 2, "regex": "a"}, "regex: not with tools that bind"),
        ({"chat_template_kwargs": "[]"}, "chat_template_kwargs: must be the text of a JSON"),
        ({"chat_template_kwargs": '{"tokenize": 1}'}, "chat_template_kwargs: tokenize is not"),
        (
            {"messages": [{"role": "assistant", "tool_calls": A_CALL}]},
            "messages.0.tool_calls.0.arguments: must be the text of a JSON object",
        ),
        ({"messages": [], "prompt": "a", "tools": GRPC_TOOLS}, "tools: only with messages"),
    ],
)
async def test_what_cannot_be_is_refused_over_grpc(fields: dict[str, Any], message: str) -> None:
    async with templated(HERMES_TEMPLATE, replicas=0) as made:
        context = Context()
        await made.Generate(pb.GenerateRequest(**({"messages": ASKED} | fields)), context)
        assert context.code is StatusCode.INVALID_ARGUMENT
        assert context.details.startswith(message)
