"""Proves: OpenAI's API gives the answers of the gRPC API, whole and streamed, in OpenAI's shapes.

Null in place of a field asks for nothing, wherever the field stands; in a JSON schema and in what a
template is told null is a value.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from cluster.config_sources import from_args
from cluster.frontend.http_api.bodies.parameters import PARAMETERS, Kind
from cluster.frontend.http_api.openai_answers import OpenAIAnswer
from protos import lockstep_pb2 as pb
from scheduler.messages import FinishReason
from tests.cluster.frontend.http_rig import (
    ASKED,
    HERMES_TEMPLATE,
    MODEL,
    TURNS,
    TURNS_JSON,
    events,
    http,
    messages,
    numbered,
    post,
    served,
    served_tiny,
    together,
)
from tests.cluster.frontend.rig import PROMPT, Context, pool_of, unfinished
from tests.cluster.wire import until


@pytest.mark.parametrize("chat", [True, False])
async def test_an_answer_is_the_one_of_the_grpc_api(chat: bool) -> None:
    async with served_tiny(HERMES_TEMPLATE) as (made, app):
        asked = pb.GenerateRequest(max_new_tokens=30, ignore_eos=True)
        fields: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "temperature": 0}
        if chat:
            asked.messages.extend(messages(TURNS))
            fields |= {"messages": TURNS_JSON, "logprobs": True, "top_logprobs": 1}
        else:
            asked.prompt = fields["prompt"] = PROMPT
        plain = await made.Generate(asked, Context())
        path = "chat/completions" if chat else "completions"
        whole = (await post(app, path, **fields)).json
        assert whole["object"] == ("chat.completion" if chat else "text_completion")
        [choice] = whole["choices"]
        said = {"role": "assistant", "content": plain.text}
        said |= {"reasoning": None, "reasoning_content": None}
        assert choice["message" if chat else "text"] == (said if chat else plain.text)
        assert choice["finish_reason"] == "length"
        prompt, usage = plain.end.usage.prompt_tokens, whole["usage"]
        counted = [usage[f"{name}_tokens"] for name in ("prompt", "completion", "total")]
        assert counted == [prompt, 30, prompt + 30]
        options = {"include_usage": True}
        answer = await post(app, path, **fields, stream=True, stream_options=options)
        streamed = together(numbered(answer))
        [one] = streamed["choices"].values()
        assert (one["text"], one["roles"], one["reasons"]) == (plain.text, int(chat), ["length"])
        assert streamed["usages"] == [30]
        told = choice["logprobs"]["content"] if chat else []
        assert (len(told), one["logprobs"]) == (30 * chat, told)
        assert all(chunk["usage"] is None for chunk in events(answer)[:-1])


async def test_the_model_is_listed_and_no_other_is_served() -> None:
    async with served() as (_made, app):
        listed = (await http(app, path="/v1/models")).json
        assert [model["id"] for model in listed["data"]] == [MODEL]
        one = await http(app, path=f"/v1/models/{MODEL}")
        assert one.json == listed["data"][0]
        for answer in (
            await post(app, "completions", model="gpt-4", prompt="x"),
            await http(app, path="/v1/models/gpt-4"),
        ):
            assert (answer.status, answer.error["param"]) == (404, "model")
        for path in ("/v1/models", f"/v1/models/{MODEL}"):
            assert (await http(app, path=path, client="192.0.2.7")).status == 401


@pytest.mark.parametrize("chat", [True, False])
async def test_a_choice_names_what_ended_it(chat: bool) -> None:
    """`stop_reason` as vLLM has it, `matched_stop` as SGLang has it."""
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
        fields |= {"messages": TURNS_JSON} if chat else {"prompt": PROMPT}
        path = "chat/completions" if chat else "completions"

        async def ended(**more: Any) -> list[tuple[Any, ...]]:
            whole = await post(app, path, **fields, **more)
            streamed = await post(app, path, **fields, **more, stream=True)
            last = events(streamed)[-1]
            return [
                (choice["finish_reason"], choice["stop_reason"], choice["matched_stop"])
                for [choice] in (whole.json["choices"], last["choices"])
            ]

        assert await ended() == [("length", None, None)] * 2
        [plain] = (await post(app, path, **fields)).json["choices"]
        token = plain["token_ids"][3]
        assert await ended(stop_token_ids=[token]) == [("stop", token, token)] * 2
        text = plain["message"]["content"] if chat else plain["text"]
        assert await ended(stop=text[2:4]) == [("stop", text[2:4], text[2:4])] * 2
        # The target's own end, which vLLM does not name.
        assert await ended(logit_bias={"0": 100}) == [("stop", None, 0)] * 2


async def test_an_answer_of_one_sequence_says_how_speculation_went() -> None:
    async with served() as (_made, app):
        fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
        whole = (await post(app, "completions", **fields)).json
        options = {"include_usage": True}
        streamed = await post(app, "completions", **fields, stream=True, stream_options=options)
        for said in (whole, events(streamed)[-1]):
            found = said["metrics"]["speculative_decoding"]
            steps, accepted = found["num_spec_steps"], found["num_accepted_draft_tokens"]
            details = said["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] == accepted > 0
            rejected = found["num_draft_tokens"] - accepted
            assert details["rejected_prediction_tokens"] == rejected
            histogram = found["acceptance_histogram"]
            assert min(histogram) >= 0
            assert sum(histogram) == steps
            assert sum(number * times for number, times in enumerate(histogram)) == accepted
            assert found["mean_acceptance_length"] == (steps + accepted) / steps == 60 / steps
            assert found["draft_acceptance_rate"] == accepted / found["num_draft_tokens"]
        several = (await post(app, "completions", **fields, n=2)).json
        assert "metrics" not in several


@pytest.mark.parametrize("chat", [True, False])
async def test_a_server_may_always_tell_usage_and_name_tokens_by_ids(chat: bool) -> None:
    told = {"enable_force_include_usage": True, "return_tokens_as_token_ids": True}
    config = from_args({"server": told, "frontend": {"coalesce_ms": 1}})
    async with served_tiny(HERMES_TEMPLATE, config) as (_made, app):
        fields: dict[str, Any] = {
            "max_tokens": 12,
            "ignore_eos": True,
            "temperature": 0,
            "logprobs": True,
        }
        fields |= {"messages": TURNS_JSON} if chat else {"prompt": PROMPT, "logprobs": 0}
        path = "chat/completions" if chat else "completions"
        streamed = events(await post(app, path, **fields, stream=True))
        counts = [event["usage"]["completion_tokens"] for event in streamed]
        assert counts == sorted(counts)
        assert counts[-1] == 12
        logprobs = (await post(app, path, **fields)).json["choices"][0]["logprobs"]
        names = [each["token"] for each in logprobs["content"]] if chat else logprobs["tokens"]
        assert all(name.startswith("token_id:") for name in names)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_unexpected_error_is_logged_and_told_without_its_text(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as (made, app):
        of = "next_event" if stream else "whole"
        monkeypatch.setattr(OpenAIAnswer, of, lambda *_args: 1 // 0)

        async def served_on(scope: Scope, receive: Receive, send: Send) -> None:
            with suppress(ZeroDivisionError):
                await app(scope, receive, send)

        answer = await post(served_on, "completions", prompt=PROMPT, max_tokens=4, stream=stream)
        said = answer.body.partition(b"data: ")[2] if stream else answer.body
        assert answer.status == (200 if stream else 500)
        assert json.loads(said)["error"]["status"] == "INTERNAL"
        assert b"division" not in said
        await until(lambda: not unfinished(made.service))
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_is_cancelled_leaves_no_sequence(stream: bool) -> None:
    """As Serve does where a client leaves."""
    async with served(step_s=0.02) as (made, app):
        fields = {"prompt": PROMPT, "max_tokens": 400, "n": 2, "stream": stream}
        asking = asyncio.ensure_future(post(app, "completions", **fields))
        await until(lambda: pool_of(made).snapshot.live == 2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not unfinished(made.service) and not pool_of(made).snapshot.live)
        assert pool_of(made).snapshot.finished[FinishReason.CANCELLED] == 2


# --------------------------------------------------------------------------- nulls


A_CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TURN = {"role": "assistant", "content": "", "tool_calls": [A_CALL]}
NULL = {"type": "function", "function": {"name": "look", "parameters": {"const": None}}}
PLAIN: dict[str, Any] = {
    "messages": [*ASKED, TURN],
    "tools": [NULL],
    "max_tokens": 20,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
PARTS = [{"type": "text", "text": "what is "}, {"type": "text", "text": "the weather?"}]
UNSET: dict[str, Any] = (
    PLAIN
    | {
        name: next(iter(parameter.neutral), None) if parameter.kind is Kind.REFUSED else "x"
        for name, parameter in PARAMETERS.items()
        if parameter.kind is not Kind.SUPPORTED and "." not in name
    }
    | {
        "messages": [
            {"role": "user", "content": PARTS},
            TURN | {"refusal": None, "tool_calls": [A_CALL | {"index": None}]},
        ],
        "tools": [NULL | {"function": NULL["function"] | {"strict": None, "description": None}}],
        "response_format": {"type": "text", "json_schema": None},
        "stream_options": {"include_usage": True, "include_obfuscation": None},
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": False,
        "stop": None,
        "user": "me",
    }
)


async def test_what_asks_for_nothing_is_taken_and_changes_nothing() -> None:
    async with served_tiny(HERMES_TEMPLATE) as (_made, app):
        told = []
        for fields in (PLAIN, UNSET):
            *chunks, last = events(await post(app, "chat/completions", **fields))
            said = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
            asked = {name: fields[name] for name in ("messages", "tools")}
            tokens = (await post(app, "/tokenize", **asked)).json["tokens"]
            assert last["usage"]["prompt_tokens"] == len(tokens)
            told.append(("".join(said), tokens))
        assert told[0] == told[1]


async def test_null_is_a_value_where_names_are_the_clients_own() -> None:
    async with served_tiny() as (_made, app):
        schema = {"name": "x", "strict": None, "schema": {"const": None}}
        for shape in (
            {"response_format": {"type": "json_schema", "json_schema": schema}},
            {"structured_outputs": {"json": {"const": None}, "regex": None}},
        ):
            answer = await post(app, "completions", prompt="x = ", max_tokens=20, **shape)
            assert answer.json["choices"][0]["text"] == "null"
    template = "{% if style is defined and style is none %}x{% endif %}{{ messages[0].content }}"
    async with served_tiny(template) as (_made, app):
        said = [
            await post(app, "/tokenize", messages=ASKED, chat_template_kwargs=options)
            for options in ({}, {"style": None})
        ]
        assert said[0].json["count"] < said[1].json["count"]
