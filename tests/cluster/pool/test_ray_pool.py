"""Proves: what comes with every batch takes the line, a lost line is a pool that does not answer,
and is opened again, and where there is none everything goes through the actor's handle.

The handle is a fake one in front of a real PoolActor; no Ray runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    OwnerDiedError,
    RayTaskError,
    RpcError,
)

from cluster.config import from_args
from cluster.pool.actor import PoolActor
from cluster.pool.protocol import PoolUnreachable
from cluster.pool.ray_pool import RayPool
from cluster.transport.line import Door, LineServer
from scheduler.messages import Request, Submit
from tests.cluster.fakes import FakeReplica

HOST = "127.0.0.1"
SUBMIT = Submit(Request("a", (3, 4), 5))


class Handle:
    """An actor's handle, as far as it is used; notes what was called through it."""

    def __init__(self, has_door: bool = True, secret: bytes | None = None) -> None:
        """`secret`: what the door says, though it is another."""
        self.actor = PoolActor(from_args({}))
        self.calls: list[str] = []
        self._has_door = has_door
        self._secret = secret
        self.restart()

    def restart(self) -> None:
        """A new process: another door."""
        methods = ("pull", "submit", "news")
        self.server = LineServer({name: getattr(self.actor, name) for name in methods})

    async def _door(self) -> Door:
        if not self._has_door:
            raise OSError("no port")
        door = await self.server.door(HOST)
        return door if self._secret is None else door._replace(secret=self._secret)

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            self.calls.append(method)
            return self._door() if method == "door" else getattr(self.actor, method)(*args)

        return SimpleNamespace(remote=remote)


@asynccontextmanager
async def pool_behind(handle: Handle, line: bool = True) -> AsyncIterator[RayPool]:
    pool = RayPool(lambda: handle, line)  # type: ignore[arg-type, return-value]
    async with asyncio.timeout(100):
        yield pool
    if pool._line is not None:
        pool._line.close()
    if handle.actor._ticker is not None:
        handle.actor._ticker.cancel()


async def serve_one(pool: RayPool) -> None:
    """A request that a replica takes, over whatever way the calls go."""
    await pool.join("r", FakeReplica().spec, None)
    await pool.submit("ingress", [SUBMIT], [])
    pulled, news = await asyncio.gather(pool.pull("r", 0, [], 1.0), pool.news("ingress", 0, 0.01))
    assert pulled.items[0].prefill[0].tokens == (3, 4)  # type: ignore[union-attr]
    assert news.known


def test_what_comes_with_every_batch_takes_the_line() -> None:
    async def test() -> None:
        handle = Handle()
        async with pool_behind(handle) as pool:
            await serve_one(pool)
            assert sorted(handle.calls) == ["door", "join"]

    asyncio.run(test())


def test_without_a_line_everything_goes_through_the_handle() -> None:
    async def test() -> None:
        handles = [Handle(has_door=False), Handle(secret=b"no"), Handle()]
        for handle, line in zip(handles, (True, True, False), strict=True):
            async with pool_behind(handle, line) as pool:
                await serve_one(pool)
                calls = ["door"] * line + ["join", "news", "pull", "submit"]
                assert sorted(handle.calls) == calls, "the door is asked for once"

    asyncio.run(test())


def test_a_lost_line_is_a_pool_that_does_not_answer_and_is_opened_again() -> None:
    async def test() -> None:
        handle = Handle()
        async with pool_behind(handle) as pool:
            await pool.join("r", FakeReplica().spec, None)
            waiting = asyncio.create_task(pool.pull("r", 0, [], 5.0))
            await pool.submit("ingress", [], [])
            assert pool._line is not None
            pool._line.close()
            with pytest.raises(PoolUnreachable):
                await waiting
            handle.restart()
            assert (await pool.pull("r", 0, [], 0.0)).known
            assert handle.calls.count("door") == 2

    asyncio.run(test())


@pytest.mark.parametrize(
    "error",
    [
        ActorUnavailableError("it restarts", None),
        ObjectLostError("00", None, "the reply was on a node that is gone"),
        OwnerDiedError("00", None, ""),
        RpcError("the control plane restarts"),
        GetTimeoutError("too late"),
    ],
)
def test_whatever_ray_says_of_a_lost_call_is_a_pool_that_does_not_answer(error: Exception) -> None:
    """An ingress or a replica would end with any other error."""

    async def lost() -> None:
        raise error

    async def test() -> None:
        actor = SimpleNamespace(status=SimpleNamespace(remote=lost))
        with pytest.raises(PoolUnreachable):
            await RayPool(lambda: actor).status()  # type: ignore[arg-type, return-value]

    asyncio.run(test())


@pytest.mark.parametrize(
    "fault", [AssertionError("a broken invariant"), ValueError("wrong"), TimeoutError("late")]
)
def test_a_fault_of_the_pool_is_told_as_one(fault: Exception) -> None:
    """Ray raises an error that is of the fault's own type as well."""

    async def fails() -> None:
        raise RayTaskError("status", "its traceback", fault).as_instanceof_cause()

    async def test() -> None:
        actor = SimpleNamespace(status=SimpleNamespace(remote=fails))
        with pytest.raises(RayTaskError, match="its traceback"):
            await RayPool(lambda: actor).status()  # type: ignore[arg-type, return-value]

    asyncio.run(test())


def test_a_search_for_the_actor_that_hangs_keeps_no_call_and_no_second_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts are tokenized on the same few threads."""
    monkeypatch.setattr("cluster.pool.ray_pool._ANSWER_S", 0.05)
    found = threading.Event()
    searches: list[int] = []

    async def test() -> None:
        handle = Handle()

        def open_actor() -> Handle:
            searches.append(1)
            assert found.wait(120)
            return handle

        async with pool_behind(handle, line=False) as pool:
            pool._open_actor = open_actor  # type: ignore[assignment]
            for _ in range(2):
                calls = [pool.status() for _ in range(10)]
                answers = await asyncio.gather(*calls, return_exceptions=True)
                assert all(isinstance(answer, PoolUnreachable) for answer in answers)
            # The thread may begin late.
            while not searches:
                await asyncio.sleep(0.001)
            assert len(searches) == 1
            found.set()
            while pool._actor is None:
                await asyncio.sleep(0.001)
            assert (await pool.status()).process_id
            assert len(searches) == 1

    try:
        asyncio.run(test())
    finally:
        found.set()


def test_a_search_for_the_actor_that_fails_is_begun_again() -> None:
    async def test() -> None:
        handle = Handle()
        tries: list[int] = []

        def open_actor() -> Handle:
            tries.append(1)
            if len(tries) == 1:
                raise RpcError("the control plane restarts")
            return handle

        async with pool_behind(handle, line=False) as pool:
            pool._open_actor = open_actor  # type: ignore[assignment]
            with pytest.raises(PoolUnreachable):
                await pool.status()
            assert (await pool.status()).process_id

    asyncio.run(test())


def test_calls_that_come_at_once_share_one_line_though_one_is_cancelled() -> None:
    async def test() -> None:
        handle = Handle()
        async with pool_behind(handle) as pool:
            calls = [asyncio.create_task(pool.submit(f"i{n}", [], [])) for n in range(5)]
            await asyncio.sleep(0)
            calls[0].cancel()
            replies = await asyncio.gather(*calls[1:])
            assert all(reply.known for reply in replies)
            assert handle.calls == ["door"]

    asyncio.run(test())
