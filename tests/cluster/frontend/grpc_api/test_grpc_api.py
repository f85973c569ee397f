"""Proves: calls are checked, answered and streamed as the proto says, with typed statuses.

The frontend talks to a pool and a fake replica in the same event loop; contexts are fakes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2

from cluster.config_sources import from_args
from cluster.frontend.grpc_api.handlers import LOCKSTEP, Unparsed
from cluster.frontend.grpc_api.messages import to_status
from cluster.frontend.status_codes import CODES, MEANINGS
from cluster.pool.protocol import PoolView
from protos import lockstep_pb2 as pb
from scheduler.draft_length import CostEstimates
from scheduler.messages import FinishReason, RejectCode, ReplicaSpec
from scheduler.state import BatchFigures
from scheduler.status import PoolStatus, ReplicaStatus
from tests.cluster.fakes import perfect
from tests.cluster.frontend.rig import (
    PROMPT,
    PROMPT_IDS,
    Context,
    both,
    frontend,
    stream,
    text_of,
    unfinished,
)
from tests.cluster.pool.rig import Stuck
from tests.cluster.scripted import joined
from tests.cluster.wire import until


async def test_unary_and_stream_give_the_same_answer() -> None:
    async with frontend(step_s=0.002) as made:
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=50, request_id="mine")
        answer = await made.Generate(request, Context())
        chunks = await stream(made, request, Context())
        expected = perfect(PROMPT_IDS, 50)
        assert list(answer.token_ids) == expected
        assert answer.text == text_of(expected)
        assert joined(chunks) == (answer.text, expected)
        assert answer.request_id == chunks[0].request_id == "mine"
        assert all(chunk.token_ids for chunk in chunks), "the last ones come with the end"
        assert [chunk.HasField("end") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        for end in (answer.end, chunks[-1].end):
            assert end.finish_reason == pb.FINISH_REASON_LENGTH
            assert end.usage == pb.Usage(prompt_tokens=len(PROMPT_IDS), completion_tokens=50)
            assert end.speculation.accepted_tokens == sum(end.speculation.accepted_at)
            assert end.speculation.steps + end.speculation.accepted_tokens >= 50
            assert len(end.replicas) == 1
            assert 0 < end.first_token_s <= end.total_s
            assert not end.HasField("seed")


async def test_an_end_by_a_stop_string_has_the_figures_of_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # They come with the pool's answer to the cancel, which is waited for no longer.
    monkeypatch.setattr("cluster.frontend.answer._USAGE_WAIT_S", 100.0)
    async with frontend(step_s=0.002) as made:
        whole = perfect(PROMPT_IDS, 60)
        stop = text_of(whole)[20:23]
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=60, stop=["never!", stop])
        answer = await made.Generate(request, Context())
        chunks = await stream(made, request, Context())
        tokens = list(answer.token_ids)
        assert joined(chunks) == (answer.text, tokens)
        assert answer.text == text_of(whole).partition(stop)[0]
        assert stop in text_of(tokens)
        assert stop not in text_of(tokens[:-1])
        for end in (answer.end, chunks[-1].end):
            assert (end.finish_reason, end.stop) == (pb.FINISH_REASON_STOP, stop)
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


async def test_overload_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to what comes while others are made tokens."""
    monkeypatch.setattr("cluster.frontend.service._TOKENIZE_INLINE", 0)
    config = from_args({"frontend": {"requests_max": 1}})
    stuck = Stuck()
    async with frontend(load=lambda: stuck, config=config) as made:
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=400)
        seen = [Context() for _ in range(3)]
        calls = [asyncio.ensure_future(made.Generate(request, each)) for each in seen]
        await until(lambda: sum(call.done() for call in calls) == 2)
        refused = [each for each, call in zip(seen, calls, strict=True) if call.done()]
        for context in refused + await both(made, request):
            assert context.code is StatusCode.RESOURCE_EXHAUSTED
            assert int(context.trailing["retry-after"]) >= 1
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        stuck.let_go.set()


async def test_an_answer_of_more_than_a_message_may_hold_is_refused_for_good() -> None:
    async with frontend() as made:
        made.answer_bytes_max = 4096
        request = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=128, n=16)
        context = Context()
        assert not (await made.Generate(request, context)).text
        assert context.code is StatusCode.INVALID_ARGUMENT
        assert "or for a stream" in context.details


async def test_bytes_that_are_no_message_are_refused_as_such() -> None:
    wrong: Any = Unparsed(7)
    async with frontend(replicas=0) as made:
        seen = [*await both(made, wrong), Context(), Context()]
        await made.Status(wrong, seen[2])
        await made.Check(wrong, seen[3])
    told = [(context.code, context.details.partition(" ")[0]) for context in seen]
    assert told == [(StatusCode.INVALID_ARGUMENT, "request:")] * 4


async def test_health_knows_the_service_and_whether_a_replica_is_ready() -> None:
    states = health_pb2.HealthCheckResponse
    async with frontend() as made:
        for service in ("", LOCKSTEP.full_name):
            request = health_pb2.HealthCheckRequest(service=service)
            assert (await made.Check(request, Context())).status == states.SERVING
        context = Context()
        await made.Check(health_pb2.HealthCheckRequest(service="other"), context)
        assert context.code is StatusCode.NOT_FOUND
    async with frontend(replicas=0) as made:
        answer = await made.Check(health_pb2.HealthCheckRequest(), Context())
        assert answer.status == states.NOT_SERVING


async def test_status_counts_what_was_done() -> None:
    async with frontend() as made:
        request = pb.GenerateRequest(prompt="x", max_new_tokens=20, draft_len=4)
        await made.Generate(request, Context())
        status = await made.Status(pb.StatusRequest(), Context())
        assert status.ready
        assert (status.requests_finished, status.tokens_committed) == (1, 20)
        assert status.acceptance == pytest.approx(status.accepted_tokens / status.draft_tokens)
        assert status.replicas[0].kv_blocks_free == status.replicas[0].kv_blocks
        assert (status.waiting_tokens, status.outstanding_tokens) == (0, 0)
        assert status.recovered == 0
        assert status.tokens_per_s > 0


def test_a_status_answer_has_what_replicas_say_and_the_sums_of_their_figures() -> None:
    spec = ReplicaSpec(kv_blocks=100, block_size=16, context_len=512, vocab_size=320)
    expected = CostEstimates(5, 0.03, 0.8, 0.6)
    replicas = tuple(
        ReplicaStatus(id=name, spec=spec, figures=figures, estimates=expected)
        for name, figures in (
            ("a", BatchFigures(step_batches=3, spread_sum=12)),
            ("b", BatchFigures(step_batches=1, spread_sum=5)),
        )
    )
    answer = to_status(PoolView("one", 2.0, PoolStatus(0, 0, replicas, finished={})))
    assert (answer.batches, answer.batch_spread_sum) == (4, 17)
    for replica in answer.replicas:
        assert replica.vocab_size == 320
        for field, value in replica.cost_estimates.ListFields():
            assert value == getattr(expected, field.name)
        assert len(replica.cost_estimates.ListFields()) == 4


def test_the_table_of_statuses_is_complete() -> None:
    assert all(reason in CODES for reason in FinishReason)
    assert all(code in CODES for code in RejectCode)
    assert set(CODES.values()) - {StatusCode.OK} <= set(MEANINGS)
