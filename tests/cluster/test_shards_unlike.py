"""Proves: with replicas of unlike size a request is served if any of them can hold it, whichever
shard that one is in, and refused if none can.

Pools, replicas and session run in one event loop, without Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from cluster.frontend.in_flight import InFlightRequest
from scheduler.messages import RejectCode
from tests.cluster.fakes import FakeReplica
from tests.cluster.test_pool import CONFIG
from tests.cluster.test_shards import MOVE_S, PROMPTS, Shards, check, shards, until
from tests.cluster.test_shards_full import Full

SMALL_BLOCKS = 4
HELD = SMALL_BLOCKS * 16
"""Tokens of content that a small replica holds."""
LONG = 200
"""New tokens that only a large one has blocks for."""


@asynccontextmanager
async def unlike(*blocks: list[int], step_s: float = 0.002) -> AsyncIterator[Shards]:
    """With replicas of so many KV blocks in each shard."""
    async with shards(0, 0) as s:
        for shard, sizes in enumerate(blocks):
            for kv_blocks in sizes:
                await s.add_replica(shard, FakeReplica(step_s, kv_blocks))
        await s.until_serving(*map(len, blocks))
        yield s


async def ended(live: InFlightRequest) -> None:
    async with asyncio.timeout(20 * MOVE_S + CONFIG.pool.beat_s):
        await live.ended.wait()


async def test_what_a_shard_cannot_hold_goes_where_it_fits() -> None:
    async with unlike([SMALL_BLOCKS] * 3, [2000]) as s:
        longs = [s.submit(prompt, LONG) for prompt in PROMPTS]
        assert {live.shard for live in longs} == {1}, "though the other one is idle"
        exact = s.submit(PROMPTS[0], HELD - len(PROMPTS[0]))
        beyond = s.submit(PROMPTS[0], HELD - len(PROMPTS[0]) + 1)
        assert (exact.shard, beyond.shard) == (0, 1)
        await check(longs, LONG)
        assert all(not live.recovered for live in longs), "nowhere else before"
        await check([exact], exact.request.max_new_tokens)
        await check([beyond], beyond.request.max_new_tokens)


async def test_a_refusal_by_old_news_is_no_refusal() -> None:
    """Its large replica has gone, and this frontend has not heard of it when it chooses."""

    async with unlike([SMALL_BLOCKS], [2000]) as s:
        session = s.router.sessions[0]
        session._load = msgspec.structs.replace(session._load, length_max=2000 * 16)
        while (live := s.submit(PROMPTS[0], LONG)).shard != 0:
            pass
        await check([live], LONG)
        assert live.shard == 1
        assert not live.recovered, "no pool had accepted it before"


async def test_what_no_replica_holds_is_refused_with_its_field() -> None:
    async with unlike([SMALL_BLOCKS], [SMALL_BLOCKS]) as s:
        lives = [s.submit(prompt, LONG) for prompt in PROMPTS]
        for live in lives:
            await ended(live)
            assert live.reject is not None
            assert (live.reject.code, live.reject.field) == (
                RejectCode.INVALID,
                "max_new_tokens",
            )
        assert s.live() == [0, 0]


async def test_a_full_shard_that_could_hold_it_speaks_for_one_that_never_could() -> None:
    """Come again, and not: never."""

    async with unlike([SMALL_BLOCKS], [2000]) as s:
        full = Full(s.wires[1], 3.0)
        small = s.wires[0].actor._scheduler
        live = s.submit(PROMPTS[0], LONG)
        await ended(live)
        assert live.reject is not None
        assert (live.reject.code, live.reject.retry_after_s) == (RejectCode.OVERLOADED, 3.0)
        assert len(full.offered) == 1
        assert small.snapshot().rejected == 0, "it was not even asked"
        # By old news it is; what it says changes nothing.
        session = s.router.sessions[0]
        session._load = msgspec.structs.replace(session._load, length_max=2000 * 16)
        late = s.submit(PROMPTS[1], LONG)
        await ended(late)
        assert late.reject is not None
        assert (late.reject.code, late.reject.retry_after_s) == (RejectCode.OVERLOADED, 3.0)
        assert small.snapshot().rejected == 1


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
        s.runners[1]._member.cancel()
        if not elsewhere_first:
            await until(lambda: s.router.sessions[0].load.length_max == HELD)
            await asyncio.sleep(3 * MOVE_S)
            assert {live.shard for live in here} == {0}, "nowhere to go yet"
            short = s.submit(PROMPTS[0], 20)
            await check([short], 20)
            await s.add_replica(1)
        await check(longs, LONG)
        assert {live.shard for live in here} == {1}
        assert all(live.recovered for live in here)
        await until(lambda: s.live() == [0, 0])
