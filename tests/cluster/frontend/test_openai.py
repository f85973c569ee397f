"""Proves: OpenAI's API gives the answers of the gRPC API, whole and streamed, in OpenAI's shapes; a
parameter that is not supported or wrong is refused by its name; a client that
leaves cancels its call.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI

from cluster.config import ClusterConfig, from_args
from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.http_api.app import http_app
from protos import lockstep_pb2 as pb
from tests.cluster.frontend.rig import CONFIG, PROMPT, PROMPT_IDS, Context, frontend
from tests.cluster.frontend.test_chat import TEXT, TURNS, messages
from tests.cluster.frontend.test_http import Answer, http
from tests.cluster.wire import until

MODEL = "tiny"
TURNS_JSON = [{"role": role, "content": content} for role, content in TURNS]


@asynccontextmanager
async def served(
    config: ClusterConfig = CONFIG, **options: Any
) -> AsyncIterator[tuple[GrpcApi, FastAPI]]:
    async with frontend(config=config, **options) as made:
        made.service._text = TEXT
        yield made, http_app(made.service)


async def post(
    app: FastAPI, path: str, headers: dict[str, str] | None = None, **fields: Any
) -> Answer:
    body = json.dumps({"model": MODEL} | fields).encode()
    return await http(app, body, path=f"/v1/{path}", headers=headers)


def events(answer: Answer) -> list[dict[str, Any]]:
    """Of a stream that came to its proper end."""
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
    lines = answer.body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.partition("data: ")[2]) for line in lines[:-2]]


def error(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.body)["error"]
    return found


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_an_answer_is_the_one_of_the_grpc_api(chat: bool, temperature: float) -> None:
    async with served(step_s=0.001) as (made, app):
        asked = pb.GenerateRequest(
            temperature=temperature, top_k=40, top_p=0.9, min_p=0.01, seed=7, max_new_tokens=30
        )
        fields: dict[str, Any] = {
            "temperature": temperature,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.01,
            "seed": 7,
            "max_tokens": 30,
        }
        if chat:
            asked.messages.extend(messages(TURNS))
            fields["messages"] = TURNS_JSON
        else:
            asked.prompt = fields["prompt"] = PROMPT
        plain = await made.Generate(asked, Context())
        path = "chat/completions" if chat else "completions"
        whole = json.loads((await post(app, path, **fields)).body)
        [choice] = whole["choices"]
        text = choice["message"]["content"] if chat else choice["text"]
        assert text == plain.text
        assert choice["finish_reason"] == "length"
        usage = whole["usage"]
        assert usage["prompt_tokens"] == plain.end.usage.prompt_tokens
        assert usage["completion_tokens"] == 30
        assert usage["total_tokens"] == usage["prompt_tokens"] + 30
        options = {"include_usage": True}
        answer = await post(app, path, **fields, stream=True, stream_options=options)
        *chunks, last = events(answer)
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 30)
        assert all(chunk["usage"] is None for chunk in chunks)
        assert {chunk["id"] for chunk in chunks} == {last["id"]} == {answer.headers["x-request-id"]}
        [*choices] = [chunk["choices"][0] for chunk in chunks]
        said = [one["delta"].get("content", "") if chat else one["text"] for one in choices]
        assert "".join(said) == plain.text
        reasons = [one["finish_reason"] for one in choices]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        if chat:
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert whole["object"] == "chat.completion"
            assert choice["message"]["role"] == "assistant"


async def test_choices_and_prompts_are_calls_of_their_own_with_the_next_seeds() -> None:
    async with served(step_s=0.001) as (_made, app):
        fields: dict[str, Any] = {"max_tokens": 20, "temperature": 1, "seed": 5}
        whole = await post(app, "completions", **fields, n=2, prompt=[PROMPT, PROMPT_IDS[:1]])
        choices = json.loads(whole.body)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        for choice in choices:
            prompt = (PROMPT, PROMPT_IDS[:1])[choice["index"] // 2]
            one = fields | {"seed": 5 + choice["index"] % 2, "prompt": prompt}
            single = json.loads((await post(app, "completions", **one)).body)
            assert single["choices"][0]["text"] == choice["text"]
        usage = json.loads(whole.body)["usage"]
        assert usage["prompt_tokens"] == len(PROMPT_IDS) + 1
        assert usage["completion_tokens"] == 80
        streamed = await post(
            app, "completions", **fields, n=2, prompt=[PROMPT, PROMPT_IDS[:1]], stream=True
        )
        texts: dict[int, str] = defaultdict(str)
        for event in events(streamed):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert [texts[index] for index in range(4)] == [choice["text"] for choice in choices]


async def test_a_stop_string_ends_the_text_before_it() -> None:
    async with served() as (_made, app):
        fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
        text = json.loads((await post(app, "completions", **fields)).body)["choices"][0]["text"]
        for stop in (text[20:23], ["never!", text[20:23]]):
            answer = await post(app, "completions", **fields, stop=stop)
            [choice] = json.loads(answer.body)["choices"]
            assert choice["text"] == text[: text.index(text[20:23])]
            assert choice["finish_reason"] == "stop"


async def test_the_model_is_listed_and_no_other_is_served() -> None:
    async with served() as (_made, app):
        listed = json.loads((await http(app, path="/v1/models")).body)
        assert [model["id"] for model in listed["data"]] == [MODEL]
        answer = await post(app, "completions", model="gpt-4", prompt="x")
        assert (answer.status, error(answer)["param"]) == (404, "model")
        assert (await http(app, path="/v1/models", client="192.0.2.7")).status == 401


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("completions", {"prompt": "x", "best_of": 2}, "best_of"),
        ("completions", {"prompt": "x", "frequency_penalty": 2.5}, "frequency_penalty"),
        ("completions", {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
        ("completions", {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias"),
        ("completions", {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias"),
        ("completions", {"prompt": "x", "logit_bias": {"9999": 1}}, "logit_bias"),
        ("completions", {"prompt": "x", "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ("completions", {"prompt": "x", "bad_words": [""]}, "bad_words"),
        ("completions", {"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
        (
            "completions",
            {"prompt": "x", "structured_outputs": {"regex": "("}},
            "structured_outputs",
        ),
        ("completions", {"prompt": "x", "temprature": 1}, "temprature"),
        ("completions", {"prompt": "x", "temperature": "hot"}, "temperature"),
        ("completions", {"prompt": "x", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "x", "top_k": -2}, "top_k"),
        ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ("completions", {"prompt": "x", "n": 0}, "n"),
        ("completions", {"prompt": "x", "n": 129}, "n"),
        ("completions", {"prompt": "x", "stop": 5}, "stop"),
        ("completions", {"prompt": "x", "stop": [""]}, "stop"),
        ("completions", {"prompt": "x", "seed": -1}, "seed"),
        ("completions", {"prompt": "x", "user": "y" * 129}, "user"),
        ("completions", {"prompt": "x", "messages": []}, "messages"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [1, "x"]}, "prompt"),
        ("completions", {"prompt": [True]}, "prompt"),
        ("completions", {"prompt": [[9999]]}, "prompt"),
        ("completions", {}, "prompt"),
        ("completions", {"prompt": "x", "stream_options": {}}, "stream_options"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": "x"}, "messages"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        ("chat/completions", {"messages": TURNS_JSON, "tools": [{}]}, "tools.0.type"),
        (
            "chat/completions",
            {"messages": TURNS_JSON, "response_format": {"type": "json_schema"}},
            "response_format",
        ),
        (
            "chat/completions",
            {
                "messages": TURNS_JSON,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "thing"}},
                },
            },
            "response_format",
        ),
        ("chat/completions", {"messages": TURNS_JSON, "top_logprobs": 2}, "top_logprobs"),
        (
            "chat/completions",
            {"messages": TURNS_JSON, "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
        ),
        (
            "chat/completions",
            {"messages": TURNS_JSON, "max_completion_tokens": 10**6},
            "max_completion_tokens",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_wrong_parameter_is_named(
    path: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    async with served(replicas=0) as (_made, app):
        streaming = stream and "stream_options" not in fields
        answer = await post(app, path, **fields, stream=streaming)
        assert answer.status == 400
        assert error(answer)["type"] == "invalid_request_error"
        assert error(answer)["param"] == param
        assert error(answer)["message"].startswith(f"{param}: ")


async def test_what_asks_for_nothing_is_taken() -> None:
    async with served() as (_made, app):
        neutral: dict[str, Any] = {
            "frequency_penalty": 0.0,
            "presence_penalty": 0,
            "logit_bias": {},
            "tools": None,
            "response_format": {"type": "text"},
            "logprobs": False,
            "stop": None,
            "user": "me",
        }
        turn = {"role": "assistant", "content": "lazy", "tool_calls": None, "refusal": None}
        parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox?"}]
        turns = [{"role": "user", "content": parts}, turn, {"role": "user", "content": "x"}]
        answer = await post(app, "chat/completions", messages=turns, max_tokens=3, **neutral)
        assert answer.status == 200


async def test_an_error_behind_the_first_event_is_the_last_event() -> None:
    config = from_args({"frontend": {"timeout_s": 0.3, "coalesce_ms": 1}})
    async with served(config, step_s=0.02) as (_made, app):
        answer = await post(app, "completions", prompt=PROMPT, max_tokens=400, stream=True)
        assert answer.status == 200
        *_, last, nothing = answer.body.decode().split("\n\n")
        assert nothing == ""
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "DEADLINE_EXCEEDED"
        whole = await post(app, "completions", prompt=PROMPT, max_tokens=400)
        assert (whole.status, error(whole)["code"]) == (504, "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_call(stream: bool) -> None:
    async with served(step_s=0.02) as (made, app):
        gone = asyncio.Event()
        body = json.dumps(
            {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "n": 2, "stream": stream}
        ).encode()
        asking = asyncio.ensure_future(http(app, body, path="/v1/completions", gone=gone))
        await until(lambda: made.service._router.unfinished == 2)
        gone.set()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not made.service._router.unfinished)


async def test_the_clients_name_for_a_request_comes_back() -> None:
    async with served() as (_made, app):
        headers = {"x-request-id": "mine"}
        for fields in ({}, {"stream": True}, {"top_p": 2}):
            answer = await post(app, "completions", headers, prompt="x", max_tokens=1, **fields)
            assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_a_stream_goes_on_behind_any_event_on_another_frontend(
    chat: bool, temperature: float
) -> None:
    """The seed is the server's own; the id of an event carries it."""
    path = "chat/completions" if chat else "completions"
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "stream": True}
    fields |= {"messages": TURNS_JSON} if chat else {"prompt": PROMPT, "echo": True}
    fields |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    async with served(step_s=0.02) as (_made, app):
        whole = await post(app, path, **fields)
    parts = whole.body.decode().split("\n\n")[:-3]  # without usage and [DONE]
    names = [part.partition("\n")[0].removeprefix("id: ") for part in parts]
    assert len(set(names)) > 2
    for at in (0, len(parts) // 2, len(parts) - 1):
        async with served(step_s=0.001) as (_made, app):
            rest = await post(app, path, headers={"last-event-id": names[at]}, **fields)
        assert rest.headers["x-request-id"] == whole.headers["x-request-id"]
        seen = [json.loads(part.partition("data: ")[2]) for part in parts[: at + 1]]
        both = [*seen, *events(rest)[:-1]]
        assert _text(both, chat) == _text(events(whole)[:-1], chat)
        ids = [token for event in both for token in event["choices"][0].get("token_ids", ())]
        assert len(ids) == 40


def _text(told: list[dict[str, Any]], chat: bool) -> str:
    choices = [event["choices"][0] for event in told]
    return "".join(one["delta"].get("content", "") if chat else one["text"] for one in choices)


@pytest.mark.parametrize("name", ["x", "a:b:c:d:e", "a:1:2"])
async def test_what_is_no_id_of_an_event_is_refused(name: str) -> None:
    async with served(replicas=0) as (_made, app):
        headers = {"last-event-id": name}
        answer = await post(app, "completions", headers=headers, prompt="x", stream=True)
        assert (answer.status, error(answer)["param"]) == (400, "last-event-id")


async def test_texts_become_tokens_and_tokens_texts() -> None:
    async with served() as (_made, app):
        found = await http(app, json.dumps({"prompt": PROMPT}).encode(), path="/tokenize")
        assert json.loads(found.body)["tokens"] == PROMPT_IDS
        talk = await http(app, json.dumps({"messages": TURNS_JSON}).encode(), path="/tokenize")
        assert json.loads(talk.body)["count"] > len(PROMPT_IDS)
        body = json.dumps({"tokens": PROMPT_IDS}).encode()
        assert json.loads((await http(app, body, path="/detokenize")).body) == {"prompt": PROMPT}
        wrong = await http(app, b'{"tokens": [99999]}', path="/detokenize")
        assert (wrong.status, error(wrong)["param"]) == (400, "tokens")
        neither = await http(app, b"{}", path="/tokenize")
        assert (neither.status, error(neither)["param"]) == (400, "prompt")
        assert (await http(app, path="/health")).status == 200
        assert json.loads((await http(app, path="/version")).body)["version"]
