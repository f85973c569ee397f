"""Proves: a request is refused when every shard is full, and not before.

Pools and session run in one event loop, without Ray.
"""

from __future__ import annotations

import asyncio

import pytest

from cluster.config import from_args
from scheduler.messages import Action, Event, FinishReason, Reject, RejectCode, Submit
from tests.cluster.fakes import perfect
from tests.cluster.test_pool import CONFIG
from tests.cluster.test_shards import BOUND_S, PROMPTS, shards
from tests.cluster.wire import Wire

WAITING_MAX = 3
SMALL = from_args(
    {**CONFIG.model_dump(), "scheduler": {"rows_max": 4, "waiting_requests_max": WAITING_MAX}}
)


class Full:
    """Lets a pool have no room for anything new; keeps what it was offered."""

    def __init__(self, wire: Wire, retry_after_s: float) -> None:
        self.offered: list[Submit] = []
        step = wire.actor._scheduler.step

        def full(event: Event, now_s: float) -> list[Action]:
            if not isinstance(event, Submit):
                return step(event, now_s)
            self.offered.append(event)
            refused = RejectCode.OVERLOADED
            return [Reject(event.request.id, refused, "", "full", retry_after_s)]

        wire.actor._scheduler.step = full  # type: ignore[method-assign]


async def test_a_full_queue_is_no_refusal_while_another_has_room() -> None:
    async with shards(0, 0, config=SMALL) as s:
        # By tokens the shard with the long one is the worse choice for all the others.
        counts = [300, 20, 20, 20, 20, 20]
        lives = [s.submit(PROMPTS[n], count) for n, count in enumerate(counts)]
        async with asyncio.timeout(BOUND_S):
            while s.live() != [WAITING_MAX, WAITING_MAX]:
                await asyncio.sleep(0.005)
        late = s.submit(PROMPTS[6], 20)
        await late.ended.wait()
        assert late.reject is not None
        assert late.reject.code is RejectCode.OVERLOADED
        for shard in (0, 1):
            await s.add_replica(shard)
        for prompt, live, count in zip(PROMPTS, lives, counts, strict=False):
            await live.ended.wait()
            assert live.finish is not None
            assert live.finish.reason is FinishReason.LENGTH
            assert live.tokens == perfect(prompt, count)
            assert live.finish.usage.recovered == 0, "no pool had accepted it before"
        assert [session._unconfirmed_tokens for session in s.router.sessions] == [0, 0]


@pytest.mark.parametrize("retries_s", [(7.0, 3.0), (3.0, 7.0)])
async def test_retry_after_is_that_of_the_first_with_room(
    retries_s: tuple[float, ...],
) -> None:
    async with shards(1, 1) as s:
        full = [Full(*each) for each in zip(s.wires, retries_s, strict=True)]
        live = s.submit(PROMPTS[0], 20)
        await live.ended.wait()
        assert live.reject is not None
        assert live.reject.retry_after_s == 3.0
        offers = [offer for pool in full for offer in pool.offered]
        assert [len(pool.offered) for pool in full] == [1, 1]
        assert not any(offer.accepted_before for offer in offers), "each may refuse it"
        assert s.router.unfinished == 0


async def test_a_cancelled_request_is_offered_to_nobody_else() -> None:
    async with shards(1, 1) as s:
        full = [Full(wire, 1.0) for wire in s.wires]
        live = s.submit(PROMPTS[0], 20)
        s.router.cancel(live)
        await live.ended.wait()
        assert live.reject is not None
        assert sum(len(pool.offered) for pool in full) == 1


async def test_a_shard_that_has_lost_its_replica_is_offered_nothing() -> None:
    """It would keep the request until that moved, as one accepted before, to the full one."""

    async with shards(0, 1) as s:
        full = Full(s.wires[1], 1.0)
        live = s.submit(PROMPTS[0], 20)
        await live.ended.wait()
        assert live.reject is not None
        assert len(full.offered) == 1
        assert s.live() == [0, 0]
