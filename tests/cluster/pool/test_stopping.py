"""Proves: a stopping pool refuses what is new and nothing that it had accepted, its frontend says
so at once, and a stop that never came to its end heals.

Pool, replica and frontend run in one event loop, without Ray.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from ray.exceptions import GetTimeoutError

from cluster.config_sources import from_args
from cluster.frontend.grpc_api.api import GrpcApi
from cluster.pool.ray_pool import stop_pools
from protos import lockstep_pb2 as pb
from tests.cluster.fakes import ClockAhead, perfect
from tests.cluster.frontend.rig import (
    PROMPT,
    PROMPT_IDS,
    Context,
    both,
    frontend,
    pool_of,
    session_of,
    stream,
    unfinished,
)
from tests.cluster.pool.rig import CONFIG, PROMPTS, Cluster, Stuck, check, shards, with_pool
from tests.cluster.wire import Wire, until

LONG = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=300)
STOPPING = "the server is stopping"
# What a frontend learns by its next beat only, it learns after the end of the test.
SLOW_BEATS = from_args({"pool": {"lease_s": 3000.0}})


async def stop(made: GrpcApi, cut: bool = False) -> int:
    reply = await pool_of(made).actor.stop_admitting(60.0, cut)
    await made.service.stopping.wait()
    return reply.unfinished


async def test_what_runs_is_finished_and_what_is_new_is_refused() -> None:
    async with frontend(step_s=0.01, config=SLOW_BEATS) as made:
        context = Context()
        running = asyncio.ensure_future(stream(made, LONG, context))
        await until(lambda: any(live.tokens for live in session_of(made).unfinished))
        assert await stop(made) == 1
        with pytest.MonkeyPatch.context() as patch:
            # The frontend knows by itself: no pool is asked, nothing is tokenized.
            stopping = SimpleNamespace(stopping=made.service.stopping)
            patch.setattr(made.service, "router", stopping)
            at_the_door = Context()
            await made.Generate(LONG, at_the_door)
            assert at_the_door.details == STOPPING
        for refused in await both(made, LONG):
            assert (refused.code, refused.details) == (StatusCode.UNAVAILABLE, STOPPING)
        health = await made.Check(health_pb2.HealthCheckRequest(), Context())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        status = await made.Status(pb.StatusRequest(), Context())
        assert (status.stopping, status.ready) == (True, False)
        chunks = await running
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == perfect(PROMPT_IDS, 300)
        assert context.code is None
        while await stop(made):
            await asyncio.sleep(0.01)


async def test_a_cut_ends_what_runs_as_unavailable_and_without_an_end() -> None:
    # The requests would run for longer than the whole test may.
    async with frontend(step_s=1.0, config=SLOW_BEATS) as made:
        streamed, unary = Context(), Context()
        chunks: list[pb.GenerateChunk] = []

        async def read() -> None:
            async for chunk in made.GenerateStream(LONG, streamed):
                chunks.append(chunk)

        running = asyncio.ensure_future(read())
        asking = asyncio.ensure_future(made.Generate(LONG, unary))
        await until(lambda: bool(chunks) and unfinished(made.service) == 2)
        await stop(made)
        assert not running.done()
        await stop(made, cut=True)
        await running
        await asking
        for context in (streamed, unary):
            assert (context.code, context.details) == (StatusCode.UNAVAILABLE, STOPPING)
        assert not any(chunk.HasField("end") for chunk in chunks)
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == perfect(PROMPT_IDS, len(tokens))
        assert 0 < len(tokens) < 300
        # The pool forgets them, too, long before they would have ended.
        while await stop(made, cut=True):
            await asyncio.sleep(0.01)


async def test_a_stop_that_was_never_finished_heals() -> None:
    clock = ClockAhead()
    async with frontend(clock=clock) as made:
        await stop(made)
        assert not made.service.ready()
        # The stop is good for a minute from when it was last told.
        clock.ahead_s = 61.0
        while made.service.stopping.is_set():
            await asyncio.sleep(0.05)
        assert made.service.ready()
        answer = await made.Generate(LONG, Context())
        assert list(answer.token_ids) == perfect(PROMPT_IDS, 300)


class Handle:
    """A pool's actor as `stop_pools` asks it, from another thread; counts what it was asked."""

    def __init__(self, wire: Wire) -> None:
        loop = asyncio.get_running_loop()
        self.asked = 0
        self.hangs = False

        def remote(*args: Any) -> Future[Any]:
            self.asked += 1
            if self.hangs:
                return Future()
            return asyncio.run_coroutine_threadsafe(wire.actor.stop_admitting(*args), loop)

        self.stop_admitting = SimpleNamespace(remote=remote)


def stopping_of(s: Cluster, grace_s: float) -> tuple[list[Handle], asyncio.Future[None]]:
    """A stop of all pools that has begun."""
    handles: list[Any] = [Handle(wire) for wire in s.wires]
    return handles, asyncio.ensure_future(asyncio.to_thread(stop_pools, handles, grace_s))


@pytest.fixture(autouse=True)
def _ray_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's blocking calls on the futures of a `Handle`; each pool has a moment to answer."""

    def get(reply: Future[Any], timeout: float) -> Any:
        try:
            return reply.result(timeout)
        except TimeoutError:
            raise GetTimeoutError from None

    def wait_all(replies: list[Future[Any]], *, num_returns: int, timeout: float) -> None:
        assert num_returns == len(replies)
        wait(replies, timeout)

    monkeypatch.setattr("cluster.pool.ray_pool.ray", SimpleNamespace(get=get, wait=wait_all))
    monkeypatch.setattr("cluster.pool.ray_pool._UNFINISHED_S", 0.2)


async def test_a_request_that_moves_in_the_grace_time_is_finished() -> None:
    """Though the shard that it moves to had nothing to do when it was told to stop."""
    stuck = [Stuck(may=4) for _ in range(2)]
    async with shards(0, 0) as s:
        for shard, fake in enumerate(stuck):
            await s.add_replica(shard, fake)
        await s.until_serving(1, 1)
        live = s.submit(PROMPTS[0], 400)
        here, there = live.shard, 1 - live.shard
        handles, stopping = stopping_of(s, 200.0)
        await until(lambda: handles[here].asked > 1 and len(live.tokens) > 1)
        assert handles[there].asked
        s.workers[here].end()
        for fake in stuck:
            fake.let_go.set()
        await stopping
        assert live.ended.is_set()
        assert live.shard == there
        await check([live])


async def test_what_a_pool_had_that_restarts_in_the_grace_time_is_finished() -> None:
    """The new pool admits again what the other one had, though it is told to stop before."""
    stands_at_s: list[float] = []

    def clock() -> float:
        return stands_at_s[0] if stands_at_s else time.monotonic()

    async with shards(1, step_s=0.02, clock=clock) as w:
        live = w.submit(PROMPT_IDS, 100)
        await until(lambda: len(live.tokens) > 1)
        [handle], stopping = stopping_of(w, 200.0)
        await until(lambda: handle.asked > 1)
        w.wire.loss = 1.0
        # The new pool is young until it has been told again, however long that takes here.
        stands_at_s.append(time.monotonic())
        w.wire.restart()
        asked = handle.asked
        await until(lambda: handle.asked > asked + 3 or stopping.done())
        w.wire.loss = 0.0
        await until(lambda: w.live() == [1] or stopping.done())
        stands_at_s.clear()
        await stopping
        assert live.finish is not None
        assert live.tokens == perfect(PROMPT_IDS, 100)


@pytest.mark.parametrize("grace_s", [0.0, 0.3])
async def test_a_pool_that_hangs_is_waited_for_until_a_cut_ends_all_requests(
    grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.pool.ray_pool._CUT_S", 0.2)
    # None of the requests would move, or end, within the test.
    config = with_pool(CONFIG, move_s=1000.0)
    async with shards(1, 0, config=config, step_s=1.0) as s:
        lives = [s.submit(prompt, 400) for prompt in PROMPTS]
        assert {live.shard for live in lives} == {0}, "the other one has nothing to finish"
        s.wires[0].loss = 1.0
        begun_s = time.monotonic()
        handles, stopping = stopping_of(s, grace_s)
        handles[0].hangs = True
        await lives[0].ended.wait()
        assert time.monotonic() - begun_s >= grace_s
        for live in lives:
            await live.ended.wait()
            assert live.cut
        await stopping
