"""Proves: what comes with every batch takes streams, and the rest Ray; whatever is lost between a
process and the pool, and a fault of the pool, is a pool that does not answer.

The handle is a fake one in front of a real PoolActor; no Ray runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
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

from cluster.config_sources import from_args
from cluster.pool.actor import PoolActor
from cluster.pool.protocol import FRONTEND, WORKER, PoolUnreachable
from cluster.pool.ray_pool import RayPool, open_pool
from cluster.transport.endpoint import Endpoint, Server
from cluster.transport.stream import StreamLost
from scheduler.messages import Request, Submit
from tests.cluster.fakes import FakeReplica

HOST = "127.0.0.1"
SUBMIT = Submit(Request("a", (3, 4), 5))


class Handle:
    """An actor's handle, as far as it is used; notes what was called through it."""

    def __init__(self) -> None:
        self.actor = PoolActor(from_args({}))
        self.calls: list[str] = []
        self.servers: list[Server] = []
        self.restart()

    def restart(self) -> None:
        """A new process: another authority and port."""
        serving = {WORKER: self.actor.serve_worker, FRONTEND: self.actor.serve_frontend}
        self.servers.append(Server(serving))

    async def _endpoint(self, public_pem: bytes) -> Endpoint:
        return await self.servers[-1].endpoint(HOST, public_pem)

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            self.calls.append(method)
            called = self._endpoint if method == "endpoint" else getattr(self.actor, method)
            return called(*args)

        return SimpleNamespace(remote=remote)


@asynccontextmanager
async def pool_behind(handle: Handle) -> AsyncIterator[RayPool]:
    pool = RayPool(lambda: handle)  # type: ignore[arg-type, return-value]
    async with asyncio.timeout(100):
        yield pool
    for server in handle.servers:
        await server.close()


async def test_what_comes_with_every_batch_takes_streams_opened_anew_after_a_restart() -> None:
    handle = Handle()
    async with pool_behind(handle) as pool:
        await pool.join("r", FakeReplica().spec, None)
        for _ in range(2):
            frontend = await pool.connect(FRONTEND, "f")
            frontend.send(SUBMIT)
            worker = await pool.connect(WORKER, "r")
            (batch,) = await anext(worker.frames())
            assert batch.prefill[0].tokens == (3, 4)
            await handle.servers[-1].close()
            with pytest.raises(StreamLost):
                await anext(worker.frames())
            await frontend.close()
            with pytest.raises(PoolUnreachable):
                await pool.connect(WORKER, "r")
            handle.actor = PoolActor(from_args({}))
            handle.restart()
            await pool.join("r", FakeReplica().spec, None)
        assert set(handle.calls) == {"endpoint", "join"}


@pytest.mark.parametrize(
    "error",
    [
        ActorUnavailableError("it restarts", None),
        ObjectLostError("00", None, "the reply was on a node that is gone"),
        OwnerDiedError("00", None, ""),
        RpcError("the control plane restarts"),
        GetTimeoutError("too late"),
        *(
            RayTaskError("status", "its traceback", fault).as_instanceof_cause()
            for fault in (AssertionError("a broken invariant"), ValueError("x"), TimeoutError("x"))
        ),
    ],
)
async def test_a_lost_call_and_a_fault_of_the_pool_are_a_pool_that_does_not_answer(
    error: Exception,
) -> None:
    """A frontend or a replica would end with any other error."""

    async def lost() -> None:
        raise error

    actor = SimpleNamespace(status=SimpleNamespace(remote=lost))
    with pytest.raises(PoolUnreachable, match=re.escape(str(error))):
        await RayPool(lambda: actor).status()  # type: ignore[arg-type, return-value]


def test_a_search_for_the_actor_keeps_no_call_is_made_once_and_begins_again_when_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts are tokenized on the same few threads, so one may hang and no more."""
    monkeypatch.setattr("cluster.pool.ray_pool._ANSWER_S", 0.05)
    go_on = threading.Event()
    searches: list[int] = []

    async def test() -> None:
        handle = Handle()

        def open_actor() -> Handle:
            searches.append(1)
            if len(searches) > 1:
                return handle
            assert go_on.wait(120)
            raise RpcError("the control plane restarts")

        pool = RayPool(open_actor)  # type: ignore[arg-type]
        calls = [pool.status() for _ in range(10)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(answer, PoolUnreachable) for answer in answers)
        assert len(searches) <= 1
        go_on.set()
        async with asyncio.timeout(100):
            while True:
                with contextlib.suppress(PoolUnreachable):
                    assert (await pool.status()).incarnation
                    break
        assert len(searches) == 2

    try:
        asyncio.run(test())
    finally:
        go_on.set()


HEAD = {"node:__internal_head__": 1.0}


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        ([{"GPU": 1.0}, HEAD], 1),
        ([HEAD, {"GPU": 1.0}, {"lockstep_pool": 1.0}], 2),
        ([{"GPU": 1.0}], None),
    ],
)
def test_a_pool_is_wished_onto_the_node_that_is_for_it_or_onto_the_head(
    nodes: list[dict[str, float]], chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only wished: a node that is gone must not keep it from starting."""
    options: dict[str, Any] = {}

    def actor(**given: Any) -> Any:
        options.update(given)
        return SimpleNamespace(remote=lambda _config: None)

    known = [
        {"NodeID": f"{number:056x}", "Alive": True, "Resources": resources}
        for number, resources in enumerate(nodes)
    ]
    ray = SimpleNamespace(nodes=lambda: known, remote=lambda _class: SimpleNamespace(options=actor))
    monkeypatch.setattr("cluster.pool.ray_pool.ray", ray)
    open_pool(from_args({}), "pool")
    wish = options["scheduling_strategy"]
    if chosen is None:
        assert wish == "DEFAULT"
    else:
        assert (wish.node_id, wish.soft) == (known[chosen]["NodeID"], True)
