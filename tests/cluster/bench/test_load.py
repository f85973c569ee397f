"""Proves: load through real gRPC counts what came, and a request that fails fails alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from cluster.bench.arrivals import Extent, Poisson, drive
from cluster.bench.figures import Record, summarise
from cluster.bench.load import grpc_request, over_grpc, take_chunk
from cluster.bench.workload import Workload, synthetic_prompts
from cluster.client import AsyncClient
from cluster.client.retry import Continuation
from protos import lockstep_pb2 as pb, lockstep_pb2_grpc
from replicas.models.names import TINY
from scheduler.simulation import uniform
from tests.cluster.cli.command import lockstep
from tests.cluster.fakes import CONTEXT, VOCAB, FakeReplica, tokenizer
from tests.cluster.frontend.rig import frontend

TEXTS = ["the quick", "brown fox"]


@asynccontextmanager
async def served(step_s: float = 0.0, target: str = "fake") -> AsyncIterator[str]:
    """The address of a frontend with its pool and a fake replica, behind real gRPC."""
    fake = FakeReplica(step_s)
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


async def measured(folder: Path, prompts: list[str], *arguments: str) -> dict[str, Any]:
    """What the command, beside a server in this process, writes after it has sent these prompts."""
    # The command's thread would import it, for many seconds on a slow machine.
    import cluster.bench.session  # noqa: F401

    path, written = folder / "prompts.jsonl", folder / "a.json"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    options = ["bench", "--prompts", str(path), "--json", str(written), *arguments]
    await asyncio.to_thread(lockstep, *options)
    found: dict[str, Any] = json.loads(written.read_text())
    return found


async def test_an_open_loop_does_not_wait_for_answers_and_a_failure_is_one_request() -> None:
    # 20 tokens take over five times as long as all requests take to come.
    async with served(step_s=0.1) as address, AsyncClient(address) as client:

        def make(number: int) -> pb.GenerateRequest:
            request = grpc_request(workload(), number)
            if number == 2:
                request.max_new_tokens = CONTEXT + 1
            return request

        records = await drive(over_grpc(client, make), Poisson(100.0), Extent(requests=8))
        assert [record.error for record in records].count("INVALID_ARGUMENT") == 1
        assert records[2].error == "INVALID_ARGUMENT"
        assert records[-1].sent_s < min(one.end_s or 0.0 for one in records if not one.error)


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
    stream = Continuation(grpc_request(workload(), 0))
    record = Record(0, 0.0, 0.0)
    end = pb.End(
        finish_reason=pb.FINISH_REASON_LENGTH,
        usage=pb.Usage(prompt_tokens=5, completion_tokens=128),
        speculation=pb.Speculation(steps=10, draft_tokens=40, accepted_tokens=18),
    )
    for before, chunk in (
        (0.0, pb.GenerateChunk(token_ids=range(100))),
        (1.0, pb.GenerateChunk(token_ids=range(28), end=end)),
    ):
        stream.request(before)
        seen = stream.take(chunk)
        assert seen is not None
        take_chunk(record, seen, before)
    assert (record.new_tokens, record.recovered, record.step_tokens) == (128, 1, 28)
    record.end_s = 2.0
    assert summarise([record]).committed_per_step == 28 / 10


async def test_the_command_measures_a_cluster(tmp_path: Path) -> None:
    page = tmp_path / "new" / "a.html"
    async with served(target=TINY) as address:
        arguments = ["--address", address, "--requests", "6", "--rate", "40", "--warm-up", "2"]
        arguments += ["--max-new-tokens", "12", "--html", str(page)]
        data = await measured(tmp_path, TEXTS, *arguments)
    assert page.read_text().startswith("<!DOCTYPE html>")
    figures, settings = data["figures"], data["settings"]
    assert (figures["requests"], figures["failed"], figures["new_tokens"]) == (6, 0, 6 * 12)
    assert figures["elapsed_s"] > data["requests"][-1]["due_s"] > 0
    assert figures["latency_s"]["p50"] >= figures["ttft_s"]["p50"] > 0
    assert 0 < figures["acceptance"] <= 1
    assert figures["steps"] + figures["accepted_tokens"] >= 6 * 12
    assert round(sum(figures["accepted_at"]) * figures["steps"]) == figures["accepted_tokens"]
    asked = [len(tokenizer().encode(text).ids) for text in TEXTS]
    assert figures["prompt_tokens"] == 3 * sum(asked)
    assert (settings["replicas"], settings["target"]) == (1, TINY)
