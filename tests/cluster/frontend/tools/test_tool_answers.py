"""Proves: an answer with calls of tools is the same whole, streamed, and continued from the tokens
of its first call: without parallel calls it has the first call alone, and it ends as calls do also
where the calls are among the committed tokens.

There is no replica; the test says what the pool would have said.
"""

from __future__ import annotations

import asyncio
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
    TEXT,
    TOOLS,
    Answer,
    events,
    post,
)
from tests.cluster.frontend.rig import Context, asked, brings, ends, frontend

HERMES = replace(
    TEXT,
    encoder=PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), eos_token="</s>", chat_template=HERMES_TEMPLATE
    ),
)
FIRST = 'I look.<tool_call>{"name": "time", "arguments": {"a": 1}}</tool_call>'
SECOND = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
REST = f"\n{SECOND} so."
TIME, WEATHER = ("time", '{"a": 1}'), ("weather", '{"city": "Oslo"}')
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
    if not stream:
        [choice] = answer.json["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        listed = [(one["name"], one["arguments"]) for one in calls]
        return message["content"] or "", listed, choice["finish_reason"]
    choices = [event["choices"][0] for event in events(answer)]
    content = "".join(one["delta"].get("content", "") for one in choices)
    parts = [part["function"] for one in choices for part in one["delta"].get("tool_calls", ())]
    names = [part["name"] for part in parts if "name" in part]
    given = "".join("|" * ("name" in part) + part["arguments"] for part in parts).split("|")[1:]
    return content, list(zip(names, given, strict=True)), choices[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "calls"), [({}, [TIME, WEATHER]), (ONE, [TIME])], ids=["several", "one"]
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
        assert [(one.name, one.arguments) for one in answer.tool_calls] == calls
