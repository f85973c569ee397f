"""Proves: load through gRPC counts what came, and a request that fails fails alone; any server of
OpenAI's API is measured likewise, and a foreign one gets nothing but what every server has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvicorn
from fastapi import FastAPI, Response

from cluster.bench.arrivals import Extent, Poisson, drive
from cluster.bench.figures import Record, summarise
from cluster.bench.load import grpc_request, over_grpc, take_chunk
from cluster.bench.openai_load import take_event
from cluster.bench.workload import Workload, synthetic_prompts
from cluster.client import AsyncClient
from cluster.client.retry import Continuation
from protos import lockstep_pb2 as pb, lockstep_pb2_grpc
from replicas.names import TINY
from scheduler.simulation import uniform
from tests.cluster.cli.command import lockstep
from tests.cluster.fakes import CONTEXT, VOCAB, FakeReplica, tokenizer
from tests.cluster.frontend.http_rig import http_frontend
from tests.cluster.frontend.rig import frontend
from tests.cluster.pool.rig import Stuck

TEXTS = ["the quick", "brown fox"]


@asynccontextmanager
async def served(fake: FakeReplica | None = None, target: str = "fake") -> AsyncIterator[str]:
    """The address of a frontend with its pool and a fake replica, behind real gRPC."""
    fake = fake or FakeReplica()
    fake.spec = replace(fake.spec, target=target, draft=target)
    async with frontend(load=lambda: fake) as made:
        server = grpc.aio.server()
        lockstep_pb2_grpc.add_LockstepServicer_to_server(made, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


def workload(**options: Any) -> Workload:
    prompts = synthetic_prompts(3, uniform(4, 9), VOCAB, seed=1)
    return Workload(prompts, {"max_new_tokens": 20, "ignore_eos": True, **options}, seed=7)


async def measured(folder: Path, prompts: list[str], *args: str, code: int = 0) -> dict[str, Any]:
    """What the command, beside a server in this process, writes after it has sent these prompts."""
    # The command's thread would import it, for many seconds on a slow machine.
    import cluster.bench.session  # noqa: F401

    path, written = folder / "prompts.jsonl", folder / "a.json"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    options = ["bench", "--prompts", str(path), "--json", str(written), *args]
    await asyncio.to_thread(lockstep, *options, code=code)
    found: dict[str, Any] = json.loads(written.read_text())
    return found


async def test_an_open_loop_does_not_wait_for_answers_and_a_failure_is_one_request() -> None:
    # No batch ends before all requests have come.
    stuck = Stuck()
    async with served(stuck) as address, AsyncClient(address) as client:

        def make(number: int) -> pb.GenerateRequest:
            request = grpc_request(workload(), number)
            if number == 7:
                stuck.let_go.set()
            if number == 2:
                request.max_new_tokens = CONTEXT + 1
            return request

        records = await drive(over_grpc(client, make), Poisson(100.0), Extent(requests=8))
        assert [record.error for record in records].count("INVALID_ARGUMENT") == 1
        assert records[2].error == "INVALID_ARGUMENT"
        assert "maximum context length" in summarise(records).said["INVALID_ARGUMENT"]
        assert records[-1].sent_s < min(
            record.end_s or 0.0 for record in records if not record.error
        )


def test_a_request_on_the_wire_has_the_options_and_a_seed_of_its_own() -> None:
    first, second = (grpc_request(workload(temperature=0.8), n) for n in range(2))
    assert (first.max_new_tokens, first.ignore_eos) == (20, True)
    assert (round(first.temperature, 3), first.seed, second.seed) == (0.8, 7, 8)
    again = grpc_request(workload(), len(workload().prompts))
    assert again.prompt_token_ids == first.prompt_token_ids
    assert again.cache_salt != first.cache_salt == second.cache_salt
    greedy = grpc_request(workload(), 0)
    assert not greedy.HasField("draft_len")
    assert not greedy.HasField("seed")
    assert tuple(greedy.prompt_token_ids.ids) == workload().prompts[0]
    others = synthetic_prompts(3, uniform(4, 9), VOCAB, seed=2)
    assert workload().prompts == workload().prompts != others
    assert all(4 <= len(each) <= 9 and max(each) < VOCAB for each in others)


def test_the_steps_after_a_break_stand_beside_the_tokens_since_then() -> None:
    stream, record = Continuation(grpc_request(workload(), 0)), Record(0, 0.0, 0.0, end_s=9.0)
    end = pb.End(finish_reason=pb.FINISH_REASON_LENGTH)
    end.speculation.steps, end.speculation.accepted_tokens = 10, 18
    broken, rest = pb.GenerateChunk(token_ids=range(100)), pb.GenerateChunk(token_ids=range(28))
    rest.end.CopyFrom(end)
    for now_s, chunk in enumerate((broken, rest)):
        stream.request(now_s)
        seen = stream.take(chunk)
        assert seen is not None
        take_chunk(record, seen, now_s)
    made = summarise([record])
    assert (made.new_tokens, made.recovered, made.committed_per_step) == (128, 1, 2.8)


async def test_the_command_measures_a_cluster(tmp_path: Path) -> None:
    page = tmp_path / "new" / "a.html"
    async with served(target=TINY) as address:
        arguments = ["--address", address, "--requests", "6", "--rate", "40", "--warm-up", "2"]
        arguments += ["--max-new-tokens", "12", "--draft-len", "4", "--html", str(page)]
        data = await measured(tmp_path, TEXTS, *arguments)
    assert page.read_text().startswith("<!DOCTYPE html>")
    figures, settings = data["figures"], data["settings"]
    assert (figures["requests"], figures["failed"], figures["new_tokens"]) == (6, 0, 6 * 12)
    assert figures["elapsed_s"] > data["requests"][-1]["due_s"] > 0
    assert figures["latency_s"]["p50"] >= figures["ttft_s"]["p50"] > 0
    assert 0 < figures["acceptance"] <= 1
    assert figures["steps"] + figures["accepted_tokens"] >= 6 * 12
    assert round(sum(figures["accepted_at"]) * figures["steps"]) == figures["accepted_tokens"]
    assert figures["prompt_tokens"] == 3 * sum(len(tokenizer().encode(text).ids) for text in TEXTS)
    assert (settings["replicas"], settings["target"]) == (1, TINY)


# --------------------------------------------------------------------------- OpenAI's API


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
        end = [] if owner == "breaks" else ["data: [DONE]\n\n"]
        return Response("".join([*lines, *end]), media_type="text/event-stream")

    @app.post("/v1/completions")
    def completions(fields: dict[str, Any]) -> Response:
        return answered(fields, {"text": "a"})

    @app.post("/v1/chat/completions")
    def chat(fields: dict[str, Any]) -> Response:
        return answered(fields, {"delta": {"content": "a"}})

    return app


SECOND = ["--stop-at-eos", "--endpoint", "chat", "--model", "second"]
STANDARD = {"model", "max_tokens", "temperature", "stream", "stream_options"}


@pytest.mark.parametrize(
    ("owner", "options", "model", "fields"),
    [
        ("someone", ["--stop-at-eos"], "first", STANDARD | {"prompt"}),
        ("vllm", [], "first", STANDARD | {"prompt", "cache_salt", "ignore_eos"}),
        ("someone", SECOND, "second", STANDARD | {"messages"}),
        ("breaks", ["--stop-at-eos"], "first", STANDARD | {"prompt"}),
    ],
    ids=["any server", "vLLM", "chat", "streams without an end"],
)
async def test_a_foreign_server_is_asked_for_what_it_knows(
    owner: str, options: list[str], model: str, fields: set[str], tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []
    async with over_http(foreign(owner, asked)) as port:
        arguments = ["--requests", "3", "--warm-up", "0", "--openai", f"http://127.0.0.1:{port}"]
        data = await measured(tmp_path, ["the quick"], *arguments, *options, code=owner == "breaks")
    assert [(request.keys(), request["model"]) for request in asked] == [(fields, model)] * 3
    turn = {"role": "user", "content": "the quick"}
    assert all(request.get("messages", [turn]) == [turn] for request in asked)
    of = (0, 12) if owner != "breaks" else (3, 0)
    assert (data["figures"]["failed"], data["figures"]["new_tokens"]) == of


def test_tokens_are_divided_among_the_events_that_brought_text() -> None:
    record = Record(0, 0.0, 0.0)
    for at_s, text in ((1.0, "a"), (2.0, ""), (3.0, "b"), (4.0, "c")):
        take_event(record, {"choices": [{"text": text}], "usage": None}, at_s)
    take_event(record, {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 8}}, 5.0)
    assert record.chunks == [(1.0, 2), (3.0, 3), (4.0, 3)]
    assert (record.prompt_tokens, record.error) == (4, "")
    take_event(record, {"error": None, "usage": {"completion_tokens": 0}}, 6.0)
    assert (record.new_tokens, record.error) == (3, "")
    for error in ({"code": "UNAVAILABLE"}, "slow"):
        take_event(record, {"error": error}, 7.0)
        assert record.error in ("UNAVAILABLE", error)
