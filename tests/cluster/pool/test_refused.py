"""Proves: a request goes where it fits and follows a replica that can hold it; where its shard has
no room, or no replica anywhere is large enough, it is refused, with when to come back or its field.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.config_sources import from_args
from scheduler.messages import RejectCode
from tests.cluster.pool.rig import CONFIG, MOVE_S, PROMPTS, Cluster, check, shards
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
        await until(lambda: not any(one.load.outstanding_tokens for one in s.router.sessions))


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
            assert (live.reject.code, live.reject.field) == (
                RejectCode.INVALID,
                "max_new_tokens",
            )
        assert s.live() == [0, 0]


@pytest.mark.parametrize("elsewhere_first", [False, True])
async def test_requests_follow_the_last_large_replica(
    elsewhere_first: bool,
) -> None:
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
