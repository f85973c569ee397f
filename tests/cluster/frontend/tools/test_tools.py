"""Proves: a required or strict call has the arguments that its schema says, whole and streamed, and
comes back to the template as it went; a template is told what a request says. An answer with calls
is the same whole, streamed, and continued from the tokens of its first call: without parallel calls
it has the first call alone, and it ends as calls do also where they are among committed tokens.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.http_api.app import http_app
from protos import lockstep_pb2 as pb
from scheduler.messages import FinishReason
from tests.cluster.fakes import tokenizer
from tests.cluster.frontend.http_rig import (
    ASKED,
    GRPC_TOOLS,
    HERMES_TEMPLATE,
    LLAMA_TEMPLATE,
    TEXT,
    TOOLS,
    WEATHER,
    Answer,
    numbered,
    post,
    served_tiny,
    together,
)
from tests.cluster.frontend.rig import Context, asked, brings, ends, frontend, stream

SEVERAL_TEMPLATES = {
    "default": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ",
    "tool_use": HERMES_TEMPLATE,
}


def as_http(call: pb.ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


@pytest.mark.parametrize("template", [SEVERAL_TEMPLATES, LLAMA_TEMPLATE], ids=["hermes", "llama"])
async def test_calls_have_the_arguments_of_their_schema(template: str | dict[str, str]) -> None:
    async with served_tiny(template) as (made, app):
        fields: dict[str, Any] = {
            "messages": ASKED,
            "tools": TOOLS,
            "max_tokens": 60,
            "temperature": 1,
            "seed": 4,
            "parallel_tool_calls": False,
            "logprobs": True,
            "return_token_ids": True,
        }
        named = {"type": "function", "function": {"name": "weather"}}
        # A strict tool binds what is called, but not whether.
        strict = [{"type": "function", "function": WEATHER | {"strict": True}}]
        *bodies, free, streamed = await asyncio.gather(
            post(app, "chat/completions", **fields, n=4, tool_choice="required"),
            post(app, "chat/completions", **fields, n=4, tool_choice=named),
            post(app, "chat/completions", **(fields | {"tools": strict}), n=4),
            post(app, "chat/completions", **fields, tool_choice=named, stream=True),
        )
        for told in free.json["choices"]:
            for call in told["message"].get("tool_calls", []):
                assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
        for choice, body in zip(("required", named), bodies, strict=True):
            choices = body.json["choices"]
            for told in choices:
                assert told["finish_reason"] == "tool_calls"
                assert told["message"]["content"] is None
                [call] = told["message"]["tool_calls"]
                given = json.loads(call["function"]["arguments"])
                assert choice == "required" or call["function"]["name"] == "weather"
                if call["function"]["name"] == "weather":
                    assert given["city"] in ("Rome", "Oslo")
                    assert given["days"] in (1, 2, 3)
        called = choices[0]["message"]["tool_calls"][0]["function"]
        [one] = together(numbered(streamed))["choices"].values()
        assert one["calls"] == {0: [called["name"], called["arguments"]]}
        assert not one["text"]
        assert one["logprobs"] == choices[0]["logprobs"]["content"]
        assert len(one["logprobs"]) == len(one["ids"]) == len(choices[0]["token_ids"])
        turn = choices[0]["message"]
        result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "5"}
        # gRPC gives the same calls, also in a stream.
        asked = pb.GenerateRequest(
            messages=[pb.ChatMessage(**turn) for turn in ASKED],
            tools=GRPC_TOOLS,
            tool_name="weather",
            max_new_tokens=60,
            temperature=1,
            seed=4,
        )
        answer, chunks = await asyncio.gather(
            made.Generate(asked, Context()), stream(made, asked, Context())
        )
        assert [as_http(call) for call in answer.tool_calls] == [called]
        assert not answer.text
        calls = [call for chunk in chunks for call in chunk.tool_calls]
        assert [as_http(call) for call in calls] == [called]
        came = pb.ToolCall(**called, id="c")
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


async def test_a_template_is_told_what_a_request_says() -> None:
    async with served_tiny("{{ style }}{{ messages[0].content }}") as (made, app):
        turn, style = {"role": "user", "content": "def "}, {"style": "x = "}
        fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
        plain = await post(app, "completions", **fields, prompt="x = def ")
        text = plain.json["choices"][0]["text"]
        fields |= {"messages": [turn], "chat_template_kwargs": style}
        over_http = await post(app, "chat/completions", **fields)
        assert over_http.json["choices"][0]["message"]["content"] == text
        asked = pb.GenerateRequest(messages=[pb.ChatMessage(**turn)], max_new_tokens=8)
        asked.chat_template_kwargs = json.dumps(style)
        assert (await made.Generate(asked, Context())).text == text


# --------------------------------------------------------------------------- without a replica


HERMES = replace(
    TEXT,
    encoder=PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), eos_token="</s>", chat_template=HERMES_TEMPLATE
    ),
)
FIRST = 'I look.<tool_call>{"name": "time", "arguments": {"a": 1}}</tool_call>'
SECOND = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
REST = f"\n{SECOND} so."
CALLS = [("time", '{"a": 1}'), ("weather", '{"city": "Oslo"}')]
ONE = {"parallel_tool_calls": False}


def ids(text: str) -> list[int]:
    return tokenizer().encode(text).ids


async def answered(made: GrpcApi, written: str, **fields: Any) -> Answer:
    """Of a target that writes this."""
    tools = {"messages": ASKED, "tools": TOOLS} | fields
    call = asyncio.ensure_future(post(http_app(made.service), "chat/completions", **tools))
    live = await asked(made)
    brings(made, live, ids(written))
    ends(made, live, FinishReason.STOP)
    return await call


def said(answer: Answer, stream: bool) -> tuple[str, list[tuple[str, str]], str]:
    """The content, the calls and the reason of the end."""
    if stream:
        [choice] = together(numbered(answer))["choices"].values()
        [reason] = choice["reasons"]
        return choice["text"], [(name, given) for name, given in choice["calls"].values()], reason
    [choice] = answer.json["choices"]
    functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return choice["message"]["content"] or "", calls, choice["finish_reason"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "calls"), [({}, CALLS), (ONE, CALLS[:1])], ids=["several", "one"]
)
async def test_the_answer_has_as_many_calls_as_are_allowed(
    stream: bool, fields: dict[str, Any], calls: list[tuple[str, str]]
) -> None:
    async with frontend(replicas=0, text=HERMES) as made:
        whole = said(await answered(made, FIRST + REST, stream=stream, **fields), stream)
        assert whole == ("I look.so.", calls, "tool_calls")
        again: dict[str, Any] = {"committed_token_ids": ids(FIRST), "seed": 1, "stream": stream}
        rest = said(await answered(made, REST, **again, **fields), stream)
        assert rest == ("so.", calls[1:], "tool_calls")
        request = pb.GenerateRequest(
            messages=[pb.ChatMessage(**turn) for turn in ASKED], tools=GRPC_TOOLS, **fields
        )
        call = asyncio.ensure_future(made.Generate(request, Context()))
        live = await asked(made)
        live.tokens.extend(ids(FIRST + REST))
        ends(made, live, FinishReason.STOP)
        answer = await call
        assert [(tool_call.name, tool_call.arguments) for tool_call in answer.tool_calls] == calls
