"""Proves: a stopping pool refuses what is new and nothing that it had accepted, its ingress says so
at once, and a stop that never came to its end heals.

Pool, replica and ingress run in one event loop, without Ray.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2

from cluster.config import from_args
from cluster.ingress import Ingress
from cluster.pool_actor import PoolActor
from protos import lockstep_pb2 as pb
from scheduler.messages import RejectCode, Request, Submit
from tests.cluster.fakes import perfect
from tests.cluster.test_ingress import PROMPT, PROMPT_IDS, Context, ingress, stream

STATES = health_pb2.HealthCheckResponse
LONG = pb.GenerateRequest(prompt=PROMPT, max_new_tokens=300)
STOPPING = "the server is stopping"


async def stop(made: Ingress, cut: bool = False, for_s: float = 60.0) -> int:
    [pool] = made._link._pools
    assert isinstance(pool, PoolActor)
    unfinished = await pool.stop_accepting(for_s, cut)
    await asyncio.wait_for(made._link.stopping.wait(), 0.5)
    return unfinished


def test_what_runs_is_finished_and_what_is_new_is_refused() -> None:
    async def test() -> None:
        async with ingress(step_s=0.01) as made:
            context = Context()
            running = asyncio.ensure_future(stream(made, LONG, context))
            while not made._link.unfinished:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert await stop(made) == 1
            with pytest.MonkeyPatch.context() as patch:
                # The ingress knows by itself: nobody is asked, nothing is tokenized.
                patch.setattr(made, "_link", SimpleNamespace(stopping=made._link.stopping))
                at_the_door = Context()
                await made.Generate(LONG, at_the_door)
                assert at_the_door.details == STOPPING
            for refused in (Context(), Context()):
                await made.Generate(LONG, refused)
                assert (refused.code, refused.details) == (StatusCode.UNAVAILABLE, STOPPING)
            streamed = Context()
            assert await stream(made, LONG, streamed) == [pb.GenerateChunk()]
            assert (streamed.code, streamed.details) == (StatusCode.UNAVAILABLE, STOPPING)
            chunks = await running
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            assert tokens == perfect(PROMPT_IDS, 300)
            assert context.code is None
            assert await stop(made) == 0

    asyncio.run(test())


def test_a_cut_ends_what_runs_as_unavailable_and_without_an_end() -> None:
    async def test() -> None:
        async with ingress(step_s=0.05) as made:
            streamed, unary = Context(), Context()
            running = asyncio.ensure_future(stream(made, LONG, streamed))
            asking = asyncio.ensure_future(made.Generate(LONG, unary))
            while made._link.unfinished < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            await stop(made)
            assert not running.done()
            await stop(made, cut=True)
            chunks = await asyncio.wait_for(running, 1)
            await asyncio.wait_for(asking, 1)
            for context in (streamed, unary):
                assert (context.code, context.details) == (StatusCode.UNAVAILABLE, STOPPING)
            assert not any(chunk.HasField("end") for chunk in chunks)
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            assert tokens == perfect(PROMPT_IDS, len(tokens))
            assert 0 < len(tokens) < 300
            # The pool forgets them, too, long before they would have ended.
            async with asyncio.timeout(0.5):
                while await stop(made, cut=True):
                    await asyncio.sleep(0.01)

    asyncio.run(test())


@pytest.mark.parametrize("service", ["", "lockstep.v1.Lockstep", "nobody"])
def test_an_open_watch_says_so_and_ends_at_once(service: str) -> None:
    async def test() -> None:
        async with ingress() as made:
            seen: list[int] = []

            async def watch() -> None:
                request = health_pb2.HealthCheckRequest(service=service)
                async for answer in made.Watch(request, Context()):
                    seen.append(answer.status)

            watching = asyncio.ensure_future(watch())
            while not seen:
                await asyncio.sleep(0.01)
            await stop(made)
            await asyncio.wait_for(watching, 0.5)
            known = [STATES.SERVING, STATES.NOT_SERVING]
            assert seen == ([STATES.SERVICE_UNKNOWN] if service == "nobody" else known)
            assert (await made.Check(health_pb2.HealthCheckRequest(), Context())).status == (
                STATES.NOT_SERVING
            )
            status = await made.Status(pb.StatusRequest(), Context())
            assert status.stopping
            assert not status.ready

    asyncio.run(test())


def test_what_another_incarnation_had_accepted_is_accepted_again() -> None:
    async def test() -> None:
        pool = PoolActor(from_args({}))
        await pool.submit("ingress", [], [])
        await pool.stop_accepting(60.0)
        new, old = (Request(name, (5, 6), 4) for name in ("new", "old"))
        reply = await pool.submit("ingress", [Submit(new), Submit(old, accepted_before=True)], [])
        assert [(r.request_id, r.code) for r in reply.rejects] == [("new", RejectCode.STOPPING)]
        assert reply.stopping
        assert await pool.stop_accepting(60.0) == 1
        if pool._ticker is not None:
            pool._ticker.cancel()

    asyncio.run(test())


def test_a_stop_that_was_never_finished_heals() -> None:
    async def test() -> None:
        async with ingress() as made:
            await stop(made, for_s=0.3)
            assert not await made.ready()
            while made._link.stopping.is_set():
                await asyncio.sleep(0.05)
            assert await made.ready()
            answer = await made.Generate(LONG, Context())
            assert list(answer.token_ids) == perfect(PROMPT_IDS, 300)

    asyncio.run(test())
