"""Proves: a message has the text, the calls and the reasoning that a chat has, whole and by events
that tell the same; its turns come to the template as a chat's do; tokens are counted as they are
charged; refusals have the shape of Anthropic's.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cluster.frontend.admission.control import Caller
from cluster.frontend.http_api.app import http_app
from cluster.frontend.http_api.bodies import taken
from cluster.frontend.http_api.bodies.messages import MessagesRequest
from scheduler.messages import FinishReason
from tests.cluster.fakes import tokenizer
from tests.cluster.frontend.http_rig import (
    ASKED,
    HERMES_TEMPLATE,
    TIME,
    WEATHER,
    Answer,
    post,
    served_tiny,
)
from tests.cluster.frontend.reasoning.test_reasoning import THINKER, WRITTEN
from tests.cluster.frontend.rig import asked, brings, ends, frontend

FIELDS: dict[str, Any] = {"messages": ASKED, "max_tokens": 24, "temperature": 0}
MESSAGE_TOOLS = [
    {"name": "weather", "input_schema": WEATHER["parameters"]},
    {"name": "time", "input_schema": {"type": "object"}},
]


def together(answer: Answer) -> dict[str, Any]:
    """The message that the events of a stream make."""
    assert answer.status == 200
    *parts, nothing = answer.body.decode().split("\n\n")
    assert nothing == ""
    events = []
    for part in parts:
        name, _, data = part.partition("\ndata: ")
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    first, *middle, changes, last = events
    assert (first["type"], last["type"]) == ("message_start", "message_stop")
    message: dict[str, Any] = first["message"]
    for event in middle:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(event["content_block"])
            given = ""
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][index], event["delta"]
            name = delta["type"].removesuffix("_delta")
            if name == "input_json":
                given += delta["partial_json"]
            else:
                block[name] += delta[name]
        elif message["content"][index]["type"] == "tool_use":
            message["content"][index]["input"] = json.loads(given)
    return message | changes["delta"] | {"usage": changes["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    kept = {k: v for k, v in message.items() if k not in ("id", "usage")}
    return kept | {"content": blocks, "tokens": message["usage"]["output_tokens"]}


async def test_a_message_says_what_a_chat_says_whole_and_by_events() -> None:
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        chat = await post(app, "chat/completions", **FIELDS)
        [choice] = chat.json["choices"]
        whole, stream, count = await asyncio.gather(
            post(app, "messages", **FIELDS),
            post(app, "messages", **FIELDS, stream=True),
            post(app, "messages/count_tokens", messages=ASKED),
        )
        text = {"type": "text", "text": choice["message"]["content"]}
        assert (whole.json["content"], whole.json["stop_reason"]) == ([text], "max_tokens")
        assert without_ids(together(stream)) == without_ids(whole.json)
        usage = whole.json["usage"]
        assert usage["output_tokens"] == chat.json["usage"]["completion_tokens"]
        given = sum(value for name, value in usage.items() if name != "output_tokens")
        assert given == chat.json["usage"]["prompt_tokens"] == count.json["input_tokens"]


async def test_calls_are_blocks_and_come_back_with_what_they_gave() -> None:
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        fields = FIELDS | {"max_tokens": 60, "tools": MESSAGE_TOOLS}
        choice = {"type": "tool", "name": "weather"}
        whole, stream = await asyncio.gather(
            post(app, "messages", **fields, tool_choice=choice),
            post(app, "messages", **fields, tool_choice=choice, stream=True),
        )
        [call] = whole.json["content"]
        assert (call["type"], call["name"]) == ("tool_use", "weather")
        assert call["input"]["city"] in ("Rome", "Oslo")
        assert whole.json["stop_reason"] == "tool_use"
        assert without_ids(together(stream)) == without_ids(whole.json)
        chat_tools = [{"type": "function", "function": WEATHER}, {"type": "function"}]
        chat_tools[1]["function"] = TIME | {"parameters": {"type": "object"}}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "5"}
        turns = [*ASKED, {"role": "assistant", "content": [call]}]
        turns.append({"role": "user", "content": [result]})
        function = {"name": "weather", "arguments": json.dumps(call["input"])}
        called = {"id": call["id"], "type": "function", "function": function}
        chat_turns = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [called]}]
        chat_turns.append({"role": "tool", "tool_call_id": call["id"], "content": "5"})
        message, chat = await asyncio.gather(
            post(app, "messages/count_tokens", messages=turns, tools=MESSAGE_TOOLS),
            post(app, "/tokenize", messages=chat_turns, tools=chat_tools),
        )
        assert message.json["input_tokens"] == chat.json["count"]


@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_and_a_stop_string_are_told(stream: bool) -> None:
    async with frontend(replicas=0, text=THINKER) as made:
        body = FIELDS | {"stream": stream, "stop_sequences": ["es"]}
        call = asyncio.ensure_future(post(http_app(made.service), "messages", **body))
        live = await asked(made)
        brings(made, live, tokenizer().encode(WRITTEN).ids)
        ends(made, live, FinishReason.STOP)
        answer = await call
        message = together(answer) if stream else answer.json
        if stream:  # a thought ends with its signature
            thought, _, text = answer.body.partition(b"content_block_stop")
            assert (b'"signature_delta"' in thought, b'"signature_delta"' in text) == (True, False)
        thinking = {"type": "thinking", "thinking": "I see.", "signature": ""}
        assert message["content"] == [thinking, {"type": "text", "text": "Y"}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "es")


def test_the_system_and_thoughts_come_to_the_template() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    turns = [{"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}]
    body = {"model": "m", "max_tokens": 1, "messages": turns, "system": "s"}
    body["thinking"] = {"type": "disabled"}
    [prompt] = taken(MessagesRequest, body).body.prompts
    system, turn = prompt.messages
    assert system == {"role": "system", "content": "s"}
    assert (turn["content"], turn["reasoning_content"]) == ("a", "hm")
    assert prompt.options["enable_thinking"] is False


async def test_refusals_are_shaped_as_its_clients_read_them() -> None:
    nameless = {"messages": ASKED, "tools": [{"name": ""}]}
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        for path, fields, status, kind in (
            ("messages", {"messages": ASKED}, 400, "invalid_request_error"),
            ("messages", FIELDS | {"model": "other"}, 404, "not_found_error"),
            ("messages", FIELDS | {"temperature": -1}, 400, "invalid_request_error"),
            ("messages/count_tokens", {"messages": []}, 400, "invalid_request_error"),
            ("messages", FIELDS | nameless, 400, "invalid_request_error"),
            ("messages/count_tokens", nameless, 400, "invalid_request_error"),
        ):
            refused = await post(app, path, **fields)
            assert (refused.status, refused.error["type"]) == (status, kind)
            assert refused.json["type"] == "error"
            assert refused.error["message"]
        wrong = await post(app, "messages/count_tokens", **nameless)
        assert wrong.error["message"].startswith("tools.0.name: must be 1 to 64 of the characters")


def test_its_clients_send_keys_in_a_header_of_their_own() -> None:
    caller = Caller.from_headers([("x-api-key", "k")], "127.0.0.1")
    assert caller.authorization == ("Bearer k",)
    both = [("x-api-key", "k"), ("authorization", "Bearer other")]
    assert Caller.from_headers(both, "127.0.0.1").authorization == ("Bearer other",)
