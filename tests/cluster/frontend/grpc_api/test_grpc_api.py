"""Proves: calls are checked, answered and streamed as the proto says, with typed statuses.

The frontend talks to a pool and a fake replica in the same event loop; contexts are fakes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2

from cluster.config_sources import from_args
from cluster.frontend.grpc_api.handlers import Unparsed
from cluster.frontend.grpc_api.health import SERVICE
from cluster.frontend.status_codes import CODES, MEANINGS
from protos import lockstep_pb2 as pb
from scheduler.messages import FinishReason, RejectCode
from tests.cluster.fakes import CONTEXT, VOCAB, ClockAhead, perfect
from tests.cluster.frontend.rig import (
    CONFIG,
    PROMPT,
    PROMPT_IDS,
    Context,
    both,
    frontend,
    pool_of,
    session_of,
    stream,
    text_of,
    unfinished,
)
from tests.cluster.wire import until


async def test_unary_and_stream_give_the_same_answer() -> None:
    async with frontend() as made:
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=50, request_id="mine")
        answer = await made.Generate(request, Context())
        chunks = await stream(made, request, Context())
        expected = perfect(PROMPT_IDS, 50)
        assert list(answer.token_ids) == expected
        assert answer.text == text_of(expected)
        assert "".join(chunk.text for chunk in chunks) == answer.text
        assert [token for chunk in chunks for token in chunk.token_ids] == expected
        assert answer.request_id == chunks[0].request_id == "mine"
        assert [chunk.HasField("end") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        for end in (answer.end, chunks[-1].end):
            assert end.finish_reason == pb.FINISH_REASON_LENGTH
            assert end.usage == pb.Usage(prompt_tokens=len(PROMPT_IDS), completion_tokens=50)
            assert end.speculation.accepted_tokens == sum(end.speculation.accepted_at)
            assert end.speculation.steps + end.speculation.accepted_tokens >= 50
            assert len(end.replicas) == 1
            assert 0 < end.first_token_s <= end.total_s
            assert not end.HasField("seed")


INVALID = [
    (pb.GenerateRequest(), "prompt"),
    (pb.GenerateRequest(prompt=""), "prompt"),
    (pb.GenerateRequest(prompt="x" * (CONFIG.frontend.prompt_bytes_max + 1)), "prompt"),
    (pb.GenerateRequest(prompt_token_ids=pb.TokenIds()), "prompt_token_ids"),
    (pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1, 99999])), "prompt_token_ids"),
    (pb.GenerateRequest(prompt="x", max_new_tokens=CONTEXT), "max_new_tokens"),
    (pb.GenerateRequest(prompt="x", max_new_tokens=0), "max_new_tokens"),
    (pb.GenerateRequest(prompt="x", temperature=math.nan), "temperature"),
    (pb.GenerateRequest(prompt="x", top_p=math.nan), "top_p"),
    (pb.GenerateRequest(prompt="x", min_p=-0.1), "min_p"),
    (pb.GenerateRequest(prompt="x", top_k=-1), "top_k"),
    (pb.GenerateRequest(prompt="x", draft_len=1000), "draft_len"),
    (pb.GenerateRequest(prompt="x", timeout_s=1e9), "timeout_s"),
    (pb.GenerateRequest(prompt="x", timeout_s=math.nan), "timeout_s"),
    (pb.GenerateRequest(prompt="x", stop=["a"] * 17), "stop"),
    (pb.GenerateRequest(prompt="x", stop=["a" * 257]), "stop"),
    (pb.GenerateRequest(prompt="x", stop=[""]), "stop"),
    (pb.GenerateRequest(prompt="x", stop_token_ids=list(range(2, 67))), "stop_token_ids"),
    (pb.GenerateRequest(prompt="x", stop_token_ids=[99999]), "stop_token_ids"),
    (pb.GenerateRequest(prompt="x", request_id="y" * 129), "request_id"),
    (pb.GenerateRequest(prompt="x", cache_salt="y" * 129), "cache_salt"),
    (
        pb.GenerateRequest(prompt="x", max_new_tokens=2, committed_token_ids=[5, 6, 7]),
        "committed_token_ids",
    ),
    (pb.GenerateRequest(prompt="x", committed_token_ids=[99999]), "committed_token_ids"),
    (pb.GenerateRequest(prompt="x", temperature=1, committed_token_ids=[5]), "seed"),
    (pb.GenerateRequest(prompt="x", n=2, committed_token_ids=[5]), "committed_token_ids"),
    (pb.GenerateRequest(prompt="x", n=0), "n"),
    (pb.GenerateRequest(prompt="x", n=2**31 - 1), "n"),
    (pb.GenerateRequest(prompt="x", priority=9), "priority"),
    (pb.GenerateRequest(prompt="x", committed_token_ids=[5] * 200_000), "committed_token_ids"),
    (pb.GenerateRequest(prompt="x", stop_token_ids=[5] * 200_000), "stop_token_ids"),
    (pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5] * 200_000)), "prompt_token_ids"),
    (pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5] * 5_000_000)), "request"),
    (pb.GenerateRequest(prompt="x", request_id="y" * 5_000_000), "request"),
]
"""(request, the field that the refusal must name)."""


async def test_a_bad_request_is_refused_with_the_name_of_its_field() -> None:
    async with frontend() as made:
        for number, (request, field) in enumerate(INVALID):
            for context in await both(made, request):
                assert context.code is StatusCode.INVALID_ARGUMENT, number
                assert context.details.startswith(f"{field}: "), number
            assert await stream(made, request, Context()) == [pb.GenerateChunk()]
            assert unfinished(made.service) == 0
        good = pb.GenerateRequest(prompt="still here", max_new_tokens=3)
        assert len((await made.Generate(good, Context())).token_ids) == 3


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"priority": 9},
            "priority: must be one of PRIORITY_UNSPECIFIED, PRIORITY_HIGH, PRIORITY_NORMAL,"
            " PRIORITY_LOW, is 9",
        ),
        ({"temperature": math.nan}, "temperature: must be a finite number, is nan"),
    ],
    ids=["priority", "temperature"],
)
async def test_a_sentence_has_the_field_what_is_allowed_and_the_value(
    fields: dict[str, Any], said: str
) -> None:
    async with frontend(replicas=0) as made:
        context = Context()
        await made.Generate(pb.GenerateRequest(prompt="x", **fields), context)
        assert context.details == said


async def test_the_frontend_itself_refuses_before_it_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("nothing of a refused request is decoded")

    monkeypatch.setattr("cluster.frontend.service.TextStream", refuse)
    large = {"max_new_tokens": 2_000_000, "committed_token_ids": [5] * 900_000}
    async with frontend(replicas=0) as made:
        for request, field in (
            (pb.GenerateRequest(prompt="x", **large), "max_new_tokens"),
            (pb.GenerateRequest(prompt="x", committed_token_ids=[VOCAB]), "committed_token_ids"),
            (pb.GenerateRequest(prompt="x", stop_token_ids=[VOCAB]), "stop_token_ids"),
            (pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[VOCAB])), "prompt_token_ids"),
        ):
            context = Context()
            await made.Generate(request, context)
            assert context.code is StatusCode.INVALID_ARGUMENT
            assert context.details.startswith(f"{field}: ")


async def test_a_stop_string_ends_text_and_tokens_at_the_same_place_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The figures come with the pool's answer to the cancel, which is waited for no longer.
    monkeypatch.setattr("cluster.frontend.answer._USAGE_WAIT_S", 100.0)
    async with frontend(step_s=0.002) as made:
        whole = perfect(PROMPT_IDS, 60)
        text = text_of(whole)
        stop = text[20:23]
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=60, stop=["never!", stop])
        answer = await made.Generate(request, Context())
        chunks = await stream(made, request, Context())
        assert answer.text == text[: text.index(stop)]
        assert "".join(chunk.text for chunk in chunks) == answer.text
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == list(answer.token_ids) == whole[: len(tokens)]
        assert stop in text_of(tokens)
        assert stop not in text_of(tokens[:-1])
        for end in (answer.end, chunks[-1].end):
            assert end.finish_reason == pb.FINISH_REASON_STOP
            assert end.stop == stop
            assert end.usage.completion_tokens == len(tokens)
            assert end.speculation.steps > 0
        await until(lambda: not unfinished(made.service))


async def test_a_sampled_request_without_seed_is_told_the_one_drawn() -> None:
    async with frontend() as made:
        request = pb.GenerateRequest(prompt="x", max_new_tokens=5, temperature=1.0)
        chunks = await stream(made, request, Context())
        assert chunks[0].seed == chunks[-1].end.seed
        assert chunks[0].HasField("seed")
        again = await stream(made, request, Context())
        assert again[0].seed != chunks[0].seed
        request.seed = 7
        assert (await made.Generate(request, Context())).end.seed == 7


async def test_a_deadline_gives_the_stream_its_tokens_and_the_status() -> None:
    clock = ClockAhead()
    async with frontend(step_s=0.02, clock=clock) as made:
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=400, timeout_s=100.0)
        streamed, unary = Context(), Context()
        streaming = asyncio.ensure_future(stream(made, request, streamed))
        asking = asyncio.ensure_future(made.Generate(request, unary))
        lives = session_of(made).unfinished
        await until(lambda: len(lives) == 2 and all(live.tokens for live in lives))
        clock.ahead_s = 101.0
        chunks = await streaming
        await asking
        for context in (streamed, unary):
            assert context.code is StatusCode.DEADLINE_EXCEEDED
        assert chunks[-1].end.finish_reason == pb.FINISH_REASON_DEADLINE
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert 0 < len(tokens) < 400
        assert tokens == perfect(PROMPT_IDS, len(tokens))


@pytest.mark.parametrize("count", [1, 40])
async def test_the_last_tokens_come_with_the_end(count: int) -> None:
    async with frontend(step_s=0.002) as made:
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=count, ignore_eos=True)
        chunks = await stream(made, request, Context())
        assert all(chunk.token_ids for chunk in chunks)
        assert chunks[-1].HasField("end")


@pytest.mark.parametrize(
    ("settings", "replicas"),
    [
        ({"frontend": {"requests_max": 1}}, 1),
        ({"scheduler": {"waiting_requests_max": 1}}, 0),
    ],
    ids=["frontend", "queue"],
)
async def test_overload_says_when_to_come_back(settings: dict[str, object], replicas: int) -> None:
    async with frontend(step_s=0.02, config=from_args(settings), replicas=replicas) as made:
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=400)
        first = asyncio.ensure_future(made.Generate(request, Context()))
        pool = pool_of(made)
        await until(lambda: pool.snapshot.live == 1)
        for context in await both(made, request):
            assert context.code is StatusCode.RESOURCE_EXHAUSTED
            assert int(context.trailing["retry-after"]) >= 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_bytes_that_are_no_message_are_refused_as_such() -> None:
    async with frontend() as made:
        calls = [
            lambda context: made.Generate(Unparsed(7), context),
            lambda context: _first(made.GenerateStream(Unparsed(7), context)),
            lambda context: made.Status(Unparsed(7), context),
            lambda context: made.Check(Unparsed(7), context),
            lambda context: _first(made.Watch(Unparsed(7), context)),
        ]
        for call in calls:
            context = Context()
            await call(context)
            assert context.code is StatusCode.INVALID_ARGUMENT
            assert context.details.startswith("request: ")


async def _first(answers: AsyncIterator[object]) -> object:
    return await anext(answers)


async def test_watches_of_anybody_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.frontend.grpc_api.health._WATCHES_MAX", 2)
    async with frontend() as made:
        watches = [made.Watch(health_pb2.HealthCheckRequest(), Context()) for _ in range(2)]
        for watch in watches:
            await anext(watch)
        context = Context()
        await _first(made.Watch(health_pb2.HealthCheckRequest(), context))
        assert context.code is StatusCode.RESOURCE_EXHAUSTED
        assert int(context.trailing["retry-after"]) >= 1
        await watches[0].aclose()
        answer = await _first(made.Watch(health_pb2.HealthCheckRequest(), Context()))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await made.Generate(pb.GenerateRequest(prompt="x", max_new_tokens=2), Context())


async def test_health_knows_the_service_and_whether_a_replica_is_ready() -> None:
    states = health_pb2.HealthCheckResponse
    async with frontend() as made:
        for service in ("", SERVICE):
            request = health_pb2.HealthCheckRequest(service=service)
            assert (await made.Check(request, Context())).status == states.SERVING
        context = Context()
        await made.Check(health_pb2.HealthCheckRequest(service="other"), context)
        assert context.code is StatusCode.NOT_FOUND
        answer = await _first(made.Watch(health_pb2.HealthCheckRequest(), Context()))
        assert answer.status == states.SERVING
    async with frontend(replicas=0) as made:
        answer = await made.Check(health_pb2.HealthCheckRequest(), Context())
        assert answer.status == states.NOT_SERVING


async def test_status_counts_what_was_done() -> None:
    async with frontend() as made:
        await made.Generate(pb.GenerateRequest(prompt="x", max_new_tokens=20), Context())
        status = await made.Status(pb.StatusRequest(), Context())
        assert status.ready
        assert (status.requests_finished, status.tokens_committed) == (1, 20)
        assert status.acceptance == pytest.approx(status.accepted_tokens / status.draft_tokens)
        assert status.replicas[0].kv_blocks_free == status.replicas[0].kv_blocks
        assert (status.waiting_tokens, status.outstanding_tokens) == (0, 0)
        assert (status.preempted, status.moved, status.recovered) == (0, 0, 0)
        assert status.tokens_per_s > 0


def test_the_table_of_statuses_is_complete() -> None:
    assert all(reason in CODES for reason in FinishReason)
    assert all(code in CODES for code in RejectCode)
    assert set(CODES.values()) - {StatusCode.OK} <= set(MEANINGS)
