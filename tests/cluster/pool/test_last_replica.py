"""Proves: the last replica of a pool goes so that no request is left behind: where another one
starts in its place only then, what runs ends first and what is new is refused; where clients are
led to another pool, it serves until they are there.

Pool, replicas and frontend run in one event loop, without Ray.
"""

from __future__ import annotations

import asyncio

from cluster.config_sources import from_args
from cluster.frontend.pool_session import InFlightRequest
from cluster.pool.protocol import REPLACED
from scheduler.messages import RejectCode
from tests.cluster.fakes import ClockAhead
from tests.cluster.pool.rig import CONFIG, PROMPTS, Cluster, check, shards
from tests.cluster.wire import until

ALONE = CONFIG.model_copy(
    update={"actors": CONFIG.actors.model_copy(update={"surge": False, "drain_s": 500.0})}
)
SURGES = CONFIG.model_copy(
    update={"actors": CONFIG.actors.model_copy(update={"surge": True, "drain_s": 500.0})}
)


async def begun(cluster: Cluster, count: int = 60) -> list[InFlightRequest]:
    lives = [cluster.submit(prompt, count, timeout_s=590.0) for prompt in PROMPTS[:6]]
    await until(lambda: all(live.tokens for live in lives))
    return lives


def holds(cluster: Cluster) -> bool:
    """Whether the pool keeps a replica that wants to go."""
    return any(worker.held for worker in cluster.wire.actor._workers.values())


def goes(cluster: Cluster, number: int = 0) -> asyncio.Task[None]:
    return asyncio.create_task(cluster.workers[number].close())


async def test_without_a_place_for_another_what_runs_ends_and_what_is_new_is_refused() -> None:
    async with shards(1, config=ALONE, step_s=0.005) as cluster:
        lives = await begun(cluster)
        going = goes(cluster)
        await until(lambda: not cluster.router.ready)
        new = cluster.submit(PROMPTS[0], 5)
        await new.ended.wait()
        assert new.reject is not None
        assert (new.reject.code, new.reject.message) == (RejectCode.STOPPING, REPLACED)
        assert not all(live.ended.is_set() for live in lives), "too late to be refused"
        await going
        # It has served all of them itself.
        await check(lives)
        assert max(live.recovered for live in lives) == 0
        assert all(len(live.finish.usage.replicas) == 1 for live in lives if live.finish)
        # Nothing is there, and nothing is accepted, until another one comes.
        late = cluster.submit(PROMPTS[0], 5)
        await late.ended.wait()
        assert late.reject is not None
        await cluster.add_replica()
        await cluster.until_serving(1)
        await check([cluster.submit(PROMPTS[1], 5)])


async def test_what_runs_for_longer_than_the_grace_goes_on_at_the_next_one() -> None:
    clock = ClockAhead()
    async with shards(1, config=ALONE, step_s=0.005, clock=clock) as cluster:
        lives = await begun(cluster, 400)
        going = goes(cluster)
        await until(lambda: not cluster.router.ready)
        clock.ahead_s = 0.95 * 500.0
        await going
        assert not any(live.ended.is_set() for live in lives)
        await cluster.add_replica()
        await check(lives)


async def test_a_last_replica_serves_until_clients_are_at_another_pool() -> None:
    async with shards(1, config=SURGES, step_s=0.002) as cluster:
        lives = await begun(cluster)
        going = goes(cluster)
        await until(lambda: holds(cluster))
        new = cluster.submit(PROMPTS[0], 30)
        await check([*lives, new])
        assert max(live.recovered for live in (*lives, new)) == 0
        assert not going.done()
        await cluster.router.close()
        await going


async def test_with_another_replica_in_the_pool_it_goes_at_once() -> None:
    for config in (ALONE, SURGES):
        async with shards(1, config=config, step_s=0.005) as cluster:
            lives = await begun(cluster, 300)
            going = goes(cluster)
            await until(lambda: holds(cluster))
            assert not going.done()
            await cluster.add_replica(step_s=0.001)
            await going
            await check(lives)
            assert min(live.recovered for live in lives) == 0
            replicas = {
                name for live in lives if live.finish for name in live.finish.usage.replicas
            }
            assert len(replicas) == 2


async def test_the_last_one_of_a_cluster_that_scales_to_zero_refuses_nothing() -> None:
    zero = from_args({"autoscaling": {"min_replicas": 0}, "scheduler": {"rows_max": 4}})
    alone = zero.model_copy(
        update={"actors": zero.actors.model_copy(update={"surge": False, "drain_s": 500.0})}
    )
    async with shards(1, config=alone) as cluster:
        await goes(cluster)
        waits = cluster.submit(PROMPTS[0], 5)
        await cluster.add_replica()
        await check([waits])
