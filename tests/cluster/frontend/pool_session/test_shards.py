"""Proves: with several pools each request is served by one that can, whole and with the right
tokens, though replicas change sides and pools die, and all pools together look like one. Without
room for it, or a replica that is large enough, it is refused, with when to come back or its field.

Pools, replicas and session run in one event loop, without Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.config_sources import from_args
from cluster.frontend.grpc_api.messages import to_status
from cluster.frontend.pool_session import shard_router
from cluster.pool.protocol import PoolUnreachable, PoolView
from scheduler.errors import InvalidRequest
from scheduler.messages import FinishReason, RejectCode, Request
from tests.cluster.fakes import FakeReplica
from tests.cluster.pool.rig import (
    CONFIG,
    MOVE_S,
    PROMPTS,
    TIMEOUT_S,
    Cluster,
    Stuck,
    check,
    shards,
    with_pool,
)
from tests.cluster.wire import until

SMALL_BLOCKS = 4
HELD = SMALL_BLOCKS * 16
"""Tokens of content that a small replica holds."""
LONG = 200
"""New tokens that only a large one has blocks for."""


@asynccontextmanager
async def unlike(*blocks: list[int]) -> AsyncIterator[Cluster]:
    """With replicas of so many KV blocks in each shard."""
    async with shards(0, 0) as s:
        for shard, sizes in enumerate(blocks):
            for kv_blocks in sizes:
                await s.add_replica(shard, kv_blocks=kv_blocks)
        await s.until_serving(*map(len, blocks))
        yield s


async def test_a_request_that_cannot_be_sent_is_refused_and_leaves_nothing() -> None:
    async with shards(1, 1) as s:
        for request in (Request("x", (5, 6), 9, decoding=object()), Request("x", (2**64,), 9)):
            with pytest.raises(InvalidRequest, match="request: cannot be sent"):
                s.router.submit(request, TIMEOUT_S)
        assert s.router.unfinished == 0
        await check([s.submit(PROMPTS[0], 9)])


async def test_a_request_on_its_way_counts_before_the_pool_says_so() -> None:
    async with shards(1, 1) as s:
        before = [session.load.outstanding_tokens for session in s.router.sessions]
        long = s.submit(PROMPTS[0], 300)
        short = [s.submit(prompt, 20) for prompt in PROMPTS[1:11]]
        assert before == [0, 0]
        assert {live.shard for live in short} == {1 - long.shard}
        await check([long, *short])
        await until(
            lambda: not any(session.load.outstanding_tokens for session in s.router.sessions)
        )


async def test_requests_that_came_before_any_replica_go_where_the_first_one_is() -> None:
    async with shards(0, 0) as s:
        lives = [s.submit(prompt, 20) for prompt in PROMPTS]
        assert {live.shard for live in lives} == {0, 1}
        await asyncio.sleep(3 * MOVE_S)
        assert {live.shard for live in lives} == {0, 1}, "nowhere to go yet"
        await s.add_replica(1)
        await check(lives)
        assert {live.shard for live in lives} == {1}


async def test_a_replica_that_changes_sides_finishes_its_batch_and_loses_nothing() -> None:
    async with shards(2, 0) as s:
        lives = [s.submit(prompt, 200) for prompt in PROMPTS]
        await until(lambda: any(live.tokens for live in lives))
        s.workers[1].move_to(1)
        await s.until_serving(1, 1)
        later = [s.submit(prompt, 40) for prompt in PROMPTS]
        assert 1 in {live.shard for live in later}
        await check(lives)
        await check(later)
        replicas = [replica for wire in s.wires for replica in wire.snapshot.replicas]
        assert not any(replica.draining for replica in replicas)


async def test_a_replica_that_is_on_its_way_elsewhere_can_be_closed() -> None:
    async with shards(1, 1) as s:
        lives = [s.submit(prompt, 100) for prompt in PROMPTS]
        await until(lambda: any(live.tokens for live in lives))
        s.workers[1].move_to(0)
        async with asyncio.timeout(CONFIG.actors.drain_s / 2):
            await s.workers[1].close()
        await s.until_serving(1, 0)
        await check(lives)


@pytest.mark.parametrize("says_it_lives", [False, True])
async def test_requests_leave_a_pool_that_does_not_answer(says_it_lives: bool) -> None:
    async with shards(1, 1) as s:
        lives = [s.submit(prompt, 400) for prompt in PROMPTS]
        await until(lambda: any(live.tokens for live in lives))
        s.wires[0].half_dead = says_it_lives
        s.wires[0].loss = 0.0 if says_it_lives else 1.0
        s.wires[0].break_streams()
        await until(lambda: not s.router.sessions[0].load.answers)
        # New ones go past it at once, before anybody has given it up.
        assert {live.shard for live in lives} == {0, 1}
        new = s.submit(PROMPTS[0], 20)
        assert new.shard == 1
        await check(lives)
        await check([new])
        assert {live.shard for live in lives} == {1}
        s.router.check()
        view = await s.router.status()
        assert view.silent == (() if says_it_lives else s.config.pool_names[:1])
        assert len(view.shards) == 2 - len(view.silent)


async def test_a_cancel_finds_its_request_after_a_move() -> None:
    # None ends before it is cancelled.
    stuck = Stuck(may=20)
    async with shards(1, 0) as s:
        await s.add_replica(1, stuck)
        await s.until_serving(1, 1)
        lives = [s.submit(prompt, 400) for prompt in PROMPTS]
        s.workers[0].end()
        await until(lambda: {live.shard for live in lives} == {1})
        for live in lives:
            s.router.cancel(live)
        for live in lives:
            await live.ended.wait()
            assert live.finish.reason is FinishReason.CANCELLED
        assert s.live()[1] == 0
        stuck.let_go.set()


async def test_one_shard_that_stops_stops_the_server() -> None:
    async with shards(1, 1) as s:
        await s.wires[1].actor.stop_admitting(60.0)
        await s.router.stopping.wait()
        # What the other one says changes nothing.
        await asyncio.sleep(2 * CONFIG.pool.beat_s)
        assert s.router.stopping.is_set()
        await s.wires[1].actor.stop_admitting(0.0)
        await until(lambda: not s.router.stopping.is_set())


async def test_deaths_of_replicas_are_counted_over_all_shards() -> None:
    """A request that kills a replica of this shard, of that one and of this one again has done so
    as often as one may."""
    stuck = [Stuck() for _ in range(3)]

    async def lives(_process: FakeReplica) -> bool:
        return False

    async with shards(0, 0, probe=lives) as s:
        deadly = s.submit(PROMPTS[0], 40)
        for deaths, (shard, replica) in enumerate(zip((0, 1, 0), stuck, strict=True)):
            # The only replica there is dies in a batch with the request.
            await s.add_replica(shard, replica)
            await until(replica.begun.is_set)
            assert (deadly.shard, deadly.record.deaths) == (shard, deaths)
            s.workers[-1].end()
        await deadly.ended.wait()
        assert deadly.finish.reason is FinishReason.FAILED
        assert deadly.tokens == []
        for hanging in stuck:
            hanging.let_go.set()


async def hangs() -> PoolView:
    await asyncio.Event().wait()
    raise AssertionError


async def test_replicas_share_requests_and_all_shards_look_like_one_pool_but_for_those_that_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def faulty() -> PoolView:
        raise ValueError("a fault")

    async with shards(1, 2) as s:
        lives = [s.submit(prompt, 20) for prompt in PROMPTS]
        assert [live.shard for live in lives].count(1) == len(PROMPTS) * 2 / 3
        await check(lives)
        first, second = s.config.pool_names
        assert first != second
        status = to_status(await s.router.status())
        assert status.requests_finished == len(PROMPTS)
        assert len(status.replicas) == 3
        assert [(shard.name, shard.serving) for shard in status.shards] == [(first, 1), (second, 2)]
        assert [shard.incarnation for shard in status.shards] == [
            (await wire.status()).incarnation for wire in s.wires
        ]
        monkeypatch.setattr(shard_router, "_STATUS_S", 0.05)
        monkeypatch.setattr(s.wires[0], "status", hangs)
        view = await s.router.status()
        assert (view.silent, [shard.name for shard in view.shards]) == ((first,), [second])
        status = to_status(view)
        assert len(status.replicas) == 2
        assert [shard.name for shard in status.shards if shard.silent] == [first]
        assert status.ready
        assert s.router.ready
        monkeypatch.setattr(s.wires[1], "status", hangs)
        with pytest.raises(PoolUnreachable):
            await s.router.status()
        monkeypatch.setattr(s.wires[1], "status", faulty)
        with pytest.raises(ValueError, match="a fault"):
            await s.router.status()


async def test_the_only_pool_may_not_keep_a_status_longer_than_it_may_be_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with shards(0, config=with_pool(CONFIG, unreachable_s=0.1)) as s:
        monkeypatch.setattr(s.wire, "status", hangs)
        with pytest.raises(PoolUnreachable):
            await s.router.status()


# --------------------------------------------------------------------------- refusals


async def test_a_full_queue_refuses_what_comes_and_nothing_that_it_has() -> None:
    settings = {**CONFIG.model_dump(), "scheduler": {"rows_max": 4, "waiting_requests_max": 3}}
    async with shards(0, 0, config=from_args(settings)) as s:
        lives = [s.submit(prompt, 20) for prompt in PROMPTS[:6]]
        await until(lambda: s.live() == [3, 3])
        late = s.submit(PROMPTS[6], 20)
        await late.ended.wait()
        assert late.reject.code is RejectCode.OVERLOADED
        assert late.reject.retry_after_s > 0
        for shard in (0, 1):
            await s.add_replica(shard)
        await check(lives)
        assert not any(live.recovered for live in lives)
        await until(
            lambda: not any(session.load.outstanding_tokens for session in s.router.sessions)
        )


async def test_what_a_shard_cannot_hold_goes_where_it_fits() -> None:
    async with unlike([SMALL_BLOCKS] * 3, [2000]) as s:
        longs = [s.submit(prompt, LONG) for prompt in PROMPTS]
        assert {live.shard for live in longs} == {1}, "though the other one is idle"
        exact = s.submit(PROMPTS[0], HELD - len(PROMPTS[0]))
        beyond = s.submit(PROMPTS[0], HELD - len(PROMPTS[0]) + 1)
        assert (exact.shard, beyond.shard) == (0, 1)
        await check(longs)
        assert all(not live.recovered for live in longs), "nowhere else before"
        await check([exact])
        await check([beyond])


async def test_what_no_replica_holds_is_refused_with_its_field() -> None:
    async with unlike([SMALL_BLOCKS], [SMALL_BLOCKS]) as s:
        lives = [s.submit(prompt, LONG) for prompt in PROMPTS]
        for live in lives:
            await live.ended.wait()
            assert (live.reject.code, live.reject.field) == (RejectCode.INVALID, "max_new_tokens")
        assert s.live() == [0, 0]


@pytest.mark.parametrize("elsewhere_first", [False, True])
async def test_requests_follow_the_last_large_replica(elsewhere_first: bool) -> None:
    """A shard that serves all else is no place to wait in, be the large one elsewhere there already
    or still to come."""
    async with unlike([SMALL_BLOCKS, 2000], [2000] if elsewhere_first else []) as s:
        longs = [s.submit(prompt, LONG) for prompt in PROMPTS]
        here = [live for live in longs if live.shard == 0]
        await until(lambda: any(live.tokens for live in here))
        s.workers[1].end()
        if not elsewhere_first:
            await until(lambda: s.router.sessions[0].load.length_max == HELD)
            await asyncio.sleep(3 * MOVE_S)
            assert {live.shard for live in here} == {0}, "nowhere to go yet"
            short = s.submit(PROMPTS[0], 20)
            await check([short])
            await s.add_replica(1)
        await check(longs)
        assert {live.shard for live in here} == {1}
        assert all(live.recovered for live in here)
        await until(lambda: s.live() == [0, 0])
