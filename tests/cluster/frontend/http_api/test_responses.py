"""Proves: a response has the text, the calls and the reasoning that a chat has, whole and by typed
events that tell the same; what is stored is gone on with, is its key's alone and gives way to what
comes later; one in the background is written without its client, and may be cancelled.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from cluster.frontend.http_api.app import http_app
from cluster.frontend.http_api.bodies.responses import items_of, turns_of
from cluster.frontend.http_api.responses.store import _KEPT_MAX, Kept, ResponseStore
from scheduler.messages import FinishReason
from tests.cluster.fakes import tokenizer
from tests.cluster.frontend.http_rig import (
    ASKED,
    HERMES_TEMPLATE,
    TOOLS,
    WEATHER,
    Answer,
    http,
    post,
    served_tiny,
)
from tests.cluster.frontend.reasoning.test_reasoning import THINKER, WRITTEN
from tests.cluster.frontend.rig import asked, brings, ends, frontend

RESPONSE_TOOLS = [tool["function"] | {"type": "function"} for tool in TOOLS]  # type: ignore[operator]
FIELDS: dict[str, Any] = {"temperature": 0, "max_output_tokens": 24}


async def get(app: FastAPI, name: str, method: str = "GET", action: str = "") -> Answer:
    return await http(app, path=f"/v1/responses/{name}{action}", method=method)


def told(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, each of which names its type twice."""
    assert answer.status == 200
    *parts, nothing = answer.body.decode().split("\n\n")
    assert nothing == ""
    events = []
    for number, part in enumerate(parts):
        name, _, data = part.partition("\ndata: ")
        said = json.loads(data)
        assert name == f"event: {said['type']}"
        assert said["sequence_number"] == number
        events.append(said)
    return events


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id")}
    return value


def together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events of a stream make, each of which is whole when it is done."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            text = ""
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"]
            text += event["delta"]
        elif kind.endswith((".output_text.done", ".reasoning_text.done")):
            assert event["text"] == text
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == text
        elif kind == "response.output_item.done":
            items[-1] = event["item"]
    return items


async def test_a_response_says_what_a_chat_says_whole_and_by_events() -> None:
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        [turn] = ASKED
        chat = await post(app, "chat/completions", messages=ASKED, temperature=0, max_tokens=24)
        text = chat.json["choices"][0]["message"]["content"]
        parts = [{"type": "input_text", "text": turn["content"]}]
        whole, items, stream = await asyncio.gather(
            post(app, "responses", **FIELDS, input=turn["content"]),
            post(app, "responses", **FIELDS, input=[turn | {"content": parts}]),
            post(app, "responses", **FIELDS, input=turn["content"], stream=True),
        )
        [message] = whole.json["output"]
        assert message["content"][0]["text"] == text
        assert without_ids(items.json["output"]) == without_ids([message])
        usage = whole.json["usage"]
        assert usage["output_tokens"] == chat.json["usage"]["completion_tokens"]
        assert whole.json["status"] == "incomplete"
        assert whole.json["incomplete_details"] == {"reason": "max_output_tokens"}
        events = told(stream)
        assert [event["type"] for event in events[:2]] == [
            "response.created",
            "response.in_progress",
        ]
        assert events[-1]["type"] == "response.incomplete"
        assert without_ids(together(events)) == without_ids([message])
        assert events[-1]["response"]["output"] == together(events)


async def test_calls_are_items_and_come_back_with_what_they_gave() -> None:
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        fields = FIELDS | {"tools": RESPONSE_TOOLS, "max_output_tokens": 60}
        named = {"type": "function", "name": "weather"}
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
        whole, stream, some = await asyncio.gather(
            post(app, "responses", **fields, input=ASKED, tool_choice=named),
            post(app, "responses", **fields, input=ASKED, tool_choice=named, stream=True),
            post(app, "responses", **fields, input=ASKED, tool_choice=allowed),
        )
        [call] = whole.json["output"]
        assert (call["type"], call["name"], call["status"]) == (
            "function_call",
            "weather",
            "completed",
        )
        assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
        assert without_ids(together(told(stream))) == without_ids([call])
        assert {item["name"] for item in some.json["output"]} == {"weather"}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
        more = [*ASKED, call, result]
        by_items = await post(app, "responses", **fields, input=more, tool_choice="none")
        by_id = await post(
            app,
            "responses",
            **fields,
            input=[result],
            previous_response_id=whole.json["id"],
            tool_choice="none",
        )
        assert without_ids(by_id.json["output"]) == without_ids(by_items.json["output"])
        assert by_id.json["usage"]["input_tokens"] == by_items.json["usage"]["input_tokens"]
        cut = await post(
            app, "responses", **(fields | {"max_output_tokens": 9}), input="a", tool_choice=named
        )
        [item] = cut.json["output"]
        assert (item["type"], item["content"]) == ("message", []), "a call that is cut is none"


async def test_a_schema_binds_the_text() -> None:
    schema = {"type": "json_schema", "name": "w", "schema": WEATHER["parameters"]}
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        fields = {"temperature": 1, "seed": 2, "max_output_tokens": 60}
        answer = await post(app, "responses", **fields, input="x", text={"format": schema})
        [message] = answer.json["output"]
        assert json.loads(message["content"][0]["text"])["city"] in ("Rome", "Oslo")
        assert answer.json["text"]["format"] == schema
        refused = await post(app, "responses", input="x", text={"format": {"type": "json_schema"}})
        assert (refused.status, refused.error["param"]) == (400, "text.format")


@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_is_an_item(stream: bool) -> None:
    async with frontend(replicas=0, text=THINKER) as made:
        body = {"input": "so?", "stream": stream, "top_logprobs": 0}
        call = asyncio.ensure_future(post(http_app(made.service), "responses", **body))
        live = await asked(made)
        brings(made, live, tokenizer().encode(WRITTEN).ids)
        ends(made, live, FinishReason.STOP)
        answer = await call
        output = together(told(answer)) if stream else answer.json["output"]
        thought, message = output
        assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "I see.")
        assert (message["type"], message["content"][0]["text"]) == ("message", "Yes.")
        response = told(answer)[-1]["response"] if stream else answer.json
        assert response["status"] == "completed"
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"]
        turn = {"role": "assistant", "content": "Yes."}
        thinking = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "I see.")
        assert turns_of(items_of(output)) == [turn | thinking]


async def test_what_is_stored_is_found_again_and_what_is_not_is_refused() -> None:
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        kept, gone = await asyncio.gather(
            post(app, "responses", **FIELDS, input="a"),
            post(app, "responses", **FIELDS, input="a", store=False),
        )
        assert (await get(app, kept.json["id"])).json == kept.json
        for answer in (
            await get(app, gone.json["id"]),
            await post(app, "responses", input="b", previous_response_id=gone.json["id"]),
        ):
            assert answer.status == 404
            assert "not found" in answer.error["message"]
        foreign = await post(app, "responses", input="b", previous_response_id="bad")
        assert (foreign.status, foreign.error["param"]) == (400, "previous_response_id")
        assert (await get(app, kept.json["id"], "DELETE")).json["deleted"]
        assert (await get(app, kept.json["id"])).status == 404


async def test_a_response_in_the_background_is_written_and_may_be_cancelled() -> None:
    async with frontend(replicas=0, text=THINKER) as made:
        app = http_app(made.service)
        for cancelled in (False, True):
            queued = await post(app, "responses", input="a", background=True)
            assert queued.json["status"] == "queued"
            name = queued.json["id"]
            live = await asked(made)
            if cancelled:
                assert (await get(app, name, "POST", "/cancel")).json["status"] == "cancelled"
                await live.ended.wait()
                assert (await get(app, name)).json["status"] == "cancelled"
                continue
            brings(made, live, tokenizer().encode("Yes.").ids)
            ends(made, live, FinishReason.STOP)
            while (await get(app, name)).json["status"] != "completed":
                await asyncio.sleep(0)
            again = await get(app, name, "POST", "/cancel")
            assert again.json["status"] == "completed", "its end stays what it was"
        refused = await post(app, "responses", input="a", background=True, store=False)
        assert "background can only be used when `store` is true" in refused.error["message"]


def test_a_store_keeps_the_last_ones_and_each_for_its_key() -> None:
    store = ResponseStore()
    for number in range(_KEPT_MAX + 2):
        store.put(Kept("one", {"id": str(number)}, []))
        assert store.get("0", "one") or number > _KEPT_MAX
    assert store.get("0", "one") is not None, "it was asked for, and stays"
    assert store.get("1", "one") is None
    assert store.get("0", "other") is None
    store.put(Kept("one", {"id": "long", "text": "x" * (65 << 20)}, []))
    assert store.get("0", "one") is None
