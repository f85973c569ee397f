"""Proves: the command measures a server of OpenAI's API over HTTP as it measures gRPC, names it by
/v1/models, and sends a foreign one nothing but what every server has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Response

from cluster.bench.figures import Record
from cluster.bench.openai_load import take_event
from tests.cluster.bench.test_load import measured
from tests.cluster.frontend.http_rig import http_frontend


@asynccontextmanager
async def over_http(app: FastAPI) -> AsyncIterator[int]:
    """The port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def test_a_server_is_measured_over_http_as_over_grpc(tmp_path: Path) -> None:
    arguments = ["--requests", "6", "--in-flight", "3", "--warm-up", "1", "--max-new-tokens", "20"]
    async with http_frontend() as app, over_http(app) as port:
        arguments += ["--temperature", "0.5", "--openai", f"http://localhost:{port}/v1"]
        data = await measured(tmp_path, ["the quick", "brown fox"], *arguments)
    figures = data["figures"]
    assert (figures["requests"], figures["failed"], figures["new_tokens"]) == (6, 0, 120)
    assert figures["ttft_s"]["count"] == figures["token_s"]["count"] == 6
    assert (data["settings"]["target"], data["settings"]["temperature"]) == ("tiny", 0.5)


def foreign(owner: str, asked: list[dict[str, Any]]) -> FastAPI:
    """Another project's server, which notes what it is asked."""
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": name, "owned_by": owner} for name in ("first", "second")]}

    def answered(fields: dict[str, Any], said: dict[str, Any]) -> Response:
        asked.append(fields)
        usage = {"prompt_tokens": 3, "completion_tokens": 4}
        events = [{"choices": [said]}] * 2 + [{"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return Response("".join([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")

    @app.post("/v1/completions")
    def completions(fields: dict[str, Any]) -> Response:
        return answered(fields, {"text": "a"})

    @app.post("/v1/chat/completions")
    def chat(fields: dict[str, Any]) -> Response:
        return answered(fields, {"delta": {"content": "a"}})

    return app


STANDARD = {"model", "max_tokens", "temperature", "stream", "stream_options"}


@pytest.mark.parametrize(
    ("owner", "options", "model", "fields"),
    [
        ("someone", ["--stop-at-eos"], "first", STANDARD | {"prompt"}),
        ("vllm", [], "first", STANDARD | {"prompt", "cache_salt", "ignore_eos"}),
        (
            "someone",
            ["--stop-at-eos", "--endpoint", "chat", "--model", "second"],
            "second",
            STANDARD | {"messages"},
        ),
    ],
    ids=["any server", "vLLM", "chat"],
)
async def test_a_foreign_server_is_asked_for_what_it_knows(
    owner: str, options: list[str], model: str, fields: set[str], tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []
    async with over_http(foreign(owner, asked)) as port:
        arguments = ["--requests", "3", "--warm-up", "0", "--openai", f"http://127.0.0.1:{port}"]
        data = await measured(tmp_path, ["the quick"], *arguments, *options)
    assert [(one.keys(), one["model"]) for one in asked] == [(fields, model)] * 3
    turn = {"role": "user", "content": "the quick"}
    assert all(one.get("messages", [turn]) == [turn] for one in asked)
    assert (data["figures"]["failed"], data["figures"]["new_tokens"]) == (0, 12)


def test_tokens_are_divided_among_the_events_that_brought_text() -> None:
    record = Record(0, 0.0, 0.0)
    for at_s, text in ((1.0, "a"), (2.0, ""), (3.0, "b"), (4.0, "c")):
        take_event(record, {"choices": [{"text": text}], "usage": None}, at_s)
    take_event(record, {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 8}}, 5.0)
    assert record.chunks == [(1.0, 2), (3.0, 3), (4.0, 3)]
    assert (record.prompt_tokens, record.error) == (4, "")
    take_event(record, {"error": {"code": "UNAVAILABLE"}}, 6.0)
    assert record.error == "UNAVAILABLE"
