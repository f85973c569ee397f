"""Proves: a request is refused when no shard can take it, and not before: when every queue is full,
or no replica is large enough; whichever shard can serve it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from cluster.config_sources import from_args
from cluster.pool.protocol import PoolState
from scheduler.messages import Action, Event, Reject, RejectCode, Submit
from tests.cluster.pool.rig import CONFIG, MOVE_S, PROMPTS, Cluster, check, shards
from tests.cluster.wire import Wire, until

WAITING_MAX = 3
SMALL = from_args(
    {**CONFIG.model_dump(), "scheduler": {"rows_max": 4, "waiting_requests_max": WAITING_MAX}}
)


class Offers:
    """What a pool is offered; with `retry_after_s` it has no room for anything new."""

    def __init__(self, wire: Wire, retry_after_s: float | None = None) -> None:
        self.offered: list[Submit] = []
        step = wire.actor.scheduler.step

        def noted(event: Event, now_s: float) -> list[Action]:
            if isinstance(event, Submit):
                self.offered.append(event)
                if retry_after_s is not None:
                    refused = RejectCode.OVERLOADED
                    return [Reject(event.request.id, refused, "", "full", retry_after_s)]
            return step(event, now_s)

        wire.actor.scheduler.step = noted  # type: ignore[method-assign]


async def test_a_full_queue_is_no_refusal_while_another_has_room() -> None:
    async with shards(0, 0, config=SMALL) as s:
        # By tokens the shard with the long one is the worse choice for all the others.
        counts = [300, 20, 20, 20, 20, 20]
        lives = [s.submit(PROMPTS[n], count) for n, count in enumerate(counts)]
        await until(lambda: s.live() == [WAITING_MAX, WAITING_MAX])
        late = s.submit(PROMPTS[6], 20)
        await late.ended.wait()
        assert late.reject.code is RejectCode.OVERLOADED
        for shard in (0, 1):
            await s.add_replica(shard)
        await check(lives)
        assert not any(live.recovered for live in lives), "no pool had accepted them before"
        await until(lambda: not any(one.load.outstanding_tokens for one in s.router.sessions))


@pytest.mark.parametrize("retries_s", [(7.0, 3.0), (3.0, 7.0)])
async def test_retry_after_is_that_of_the_first_with_room(
    retries_s: tuple[float, ...],
) -> None:
    async with shards(1, 1) as s:
        full = [Offers(*each) for each in zip(s.wires, retries_s, strict=True)]
        live = s.submit(PROMPTS[0], 20)
        await live.ended.wait()
        assert live.reject.retry_after_s == 3.0
        offers = [offer for pool in full for offer in pool.offered]
        assert [len(pool.offered) for pool in full] == [1, 1]
        assert not any(offer.accepted_before for offer in offers), "each may refuse it"
        assert s.router.unfinished == 0


async def test_a_cancelled_request_is_offered_to_nobody_else() -> None:
    async with shards(1, 1) as s:
        full = [Offers(wire, 1.0) for wire in s.wires]
        live = s.submit(PROMPTS[0], 20)
        s.router.cancel(live)
        await live.ended.wait()
        assert live.reject is not None
        assert sum(len(pool.offered) for pool in full) == 1


async def test_a_shard_that_has_lost_its_replica_is_offered_nothing() -> None:
    """It would keep the request until that moved, as one accepted before, to the full one."""
    async with shards(0, 1) as s:
        full = Offers(s.wires[1], 1.0)
        live = s.submit(PROMPTS[0], 20)
        await live.ended.wait()
        assert live.reject is not None
        assert len(full.offered) == 1
        assert s.live() == [0, 0]


# --------------------------------------------------------------------------- too large

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


async def told_of_a_large_replica(s: Cluster) -> None:
    """By the first shard, which has none; it has got no request yet."""
    s.wire.say(PoolState(0, replace(s.session.load, length_max=2000 * 16)))
    await until(lambda: s.session.load.length_max == 2000 * 16)


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


async def test_a_refusal_by_old_news_is_no_refusal() -> None:
    """Its large replica has gone, and this frontend has not heard of it when it chooses."""
    async with unlike([SMALL_BLOCKS], [2000]) as s:
        await told_of_a_large_replica(s)
        while (live := s.submit(PROMPTS[0], LONG)).shard != 0:
            pass
        await check([live])
        assert live.shard == 1
        assert not live.recovered, "no pool had accepted it before"


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


async def test_a_full_shard_that_could_hold_it_speaks_for_one_that_never_could() -> None:
    """Come again, and not: never."""
    async with unlike([SMALL_BLOCKS], [2000]) as s:
        full, small = Offers(s.wires[1], 3.0), Offers(s.wires[0])
        live = s.submit(PROMPTS[0], LONG)
        await live.ended.wait()
        assert (live.reject.code, live.reject.retry_after_s) == (RejectCode.OVERLOADED, 3.0)
        assert len(full.offered) == 1
        assert not small.offered, "it was not even asked"
        # By what the session knew before it is; what it says changes nothing.
        await told_of_a_large_replica(s)
        late = s.submit(PROMPTS[1], LONG)
        await late.ended.wait()
        assert (late.reject.code, late.reject.retry_after_s) == (RejectCode.OVERLOADED, 3.0)
        assert len(small.offered) == 1


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
