"""Proves: items come once and in order, survive a lost reply, and a newer poll wins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.pool.ack_queue import AckQueue

BOUND_S = 100.0
FOREVER_S = 10 * BOUND_S
"""Longer than a test may take."""


def run(test: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(BOUND_S):
            return await test()

    return asyncio.run(bounded())


def test_items_come_in_order_and_once_acknowledged_never_again() -> None:
    async def test() -> None:
        box: AckQueue[str] = AckQueue()
        box.put("a")
        box.put("b")
        assert await box.poll(0, 0) == (1, ["a", "b"])
        box.put("c")
        assert await box.poll(2, 0) == (3, ["c"])
        assert await box.poll(3, 0) == (4, [])

    run(test)


def test_a_lost_reply_is_given_again() -> None:
    async def test() -> None:
        box: AckQueue[str] = AckQueue()
        box.put("a")
        await box.poll(0, 0)
        box.put("b")
        assert await box.poll(0, 1) == (1, ["a", "b"])

    run(test)


def test_a_waiting_poll_returns_with_the_first_item() -> None:
    async def test() -> None:
        box: AckQueue[str] = AckQueue()
        poll = asyncio.ensure_future(box.poll(0, FOREVER_S))
        await asyncio.sleep(0.01)
        assert box.polled
        box.put("a")
        box.settle()
        assert await poll == (1, ["a"])
        assert not box.polled

    run(test)


def test_a_newer_poll_makes_the_older_one_return_empty() -> None:
    async def test() -> None:
        box: AckQueue[str] = AckQueue()
        older = asyncio.ensure_future(box.poll(0, FOREVER_S))
        await asyncio.sleep(0)
        newer = asyncio.ensure_future(box.poll(0, FOREVER_S))
        assert await older == (1, [])
        box.put("a")
        box.settle()
        assert await newer == (1, ["a"])

    run(test)


async def say(box: AckQueue[str], item: str, acknowledged: int, wait_s: float) -> Any:
    """A poll that brings what the item is the answer to."""
    box.put(item)
    box.settle()
    return await box.poll(acknowledged, wait_s)


def test_an_item_goes_with_the_older_poll_and_the_newer_one_waits_for_the_next() -> None:
    async def test() -> None:
        box: AckQueue[str] = AckQueue()
        poll = asyncio.ensure_future(box.poll(0, FOREVER_S))
        await asyncio.sleep(0)
        for number, item in enumerate("abc"):
            older, poll = poll, asyncio.ensure_future(say(box, item, number, FOREVER_S))
            assert await older == (number + 1, [item])
            await asyncio.sleep(0.01)
            assert box.polled
            assert not poll.done()
        box.close()
        assert await poll == (3, [])

    run(test)


def test_a_poll_that_cannot_wait_leaves_the_item_to_the_older_one() -> None:
    async def test() -> None:
        box: AckQueue[str] = AckQueue()
        older = asyncio.ensure_future(box.poll(0, FOREVER_S))
        await asyncio.sleep(0)
        assert await say(box, "a", 0, 0) == (1, [])
        assert await older == (1, ["a"])

    run(test)


def test_what_an_older_poll_was_to_return_goes_with_the_newer_one_if_it_is_cancelled() -> None:
    async def test() -> None:
        box: AckQueue[str] = AckQueue()
        older = asyncio.ensure_future(box.poll(0, FOREVER_S))
        await asyncio.sleep(0)
        newer = asyncio.ensure_future(say(box, "a", 0, FOREVER_S))
        asyncio.get_running_loop().call_soon(older.cancel)
        assert await newer == (1, ["a"])
        assert older.done()

    run(test)


def test_what_an_older_poll_has_returned_comes_again_if_it_is_not_acknowledged() -> None:
    async def test() -> None:
        box: AckQueue[str] = AckQueue()
        older = asyncio.ensure_future(box.poll(0, FOREVER_S))
        await asyncio.sleep(0)
        newer = asyncio.ensure_future(say(box, "a", 0, 0.05))
        assert await older == (1, ["a"])
        assert await newer == (1, ["a"])

    run(test)


@pytest.mark.parametrize("urgent", [True, False])
def test_only_what_is_not_urgent_waits_for_more(urgent: bool) -> None:
    async def test() -> None:
        # What is urgent does not wait for it: the test would be over before.
        gather_s = FOREVER_S if urgent else 0.1
        box: AckQueue[str] = AckQueue(gather_s)
        poll = asyncio.ensure_future(box.poll(0, FOREVER_S))
        await asyncio.sleep(0)
        started_s = time.monotonic()
        box.put("a", urgent)
        box.settle()
        if not urgent:
            await asyncio.sleep(0)
            box.put("b", urgent=False)
            box.settle()
        _, items = await poll
        assert items == (["a"] if urgent else ["a", "b"])
        assert urgent or time.monotonic() - started_s >= 0.9 * gather_s

    run(test)


def test_a_poll_without_items_ends_in_time() -> None:
    async def test() -> None:
        assert await AckQueue().poll(0, 0.02) == (1, [])

    run(test)


def test_a_cancelled_poll_leaves_the_items() -> None:
    async def test() -> None:
        box: AckQueue[str] = AckQueue()
        poll = asyncio.ensure_future(box.poll(0, FOREVER_S))
        await asyncio.sleep(0)
        poll.cancel()
        await asyncio.gather(poll, return_exceptions=True)
        box.put("a")
        box.settle()
        assert await box.poll(0, 1) == (1, ["a"])

    run(test)
