"""Proves: whatever is lost between a process and the pool, and a fault of the pool, is a pool that
does not answer; a search for it keeps nobody; it is placed on the node that is for it.

The handle is a fake one; no Ray runs.
"""

from __future__ import annotations

import asyncio
import re
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

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
from cluster.pool.protocol import WORKER, PoolUnreachable
from cluster.pool.ray_pool import RayPool, open_pool
from cluster.transport import Server


def handle(error: Exception | None = None) -> Any:
    """An actor that says its status, or this error."""

    async def status() -> str:
        if error is not None:
            raise error
        return "up"

    return SimpleNamespace(status=SimpleNamespace(remote=status))


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

    with pytest.raises(PoolUnreachable, match=re.escape(str(error))):
        await RayPool(lambda: handle(error)).status()


async def test_a_stream_begins_where_the_pool_says_that_it_is_now() -> None:
    """Each restart has another port; one that is closed is a pool that does not answer."""
    servers = [Server({WORKER: AsyncMock()}) for _ in range(2)]
    endpoint = SimpleNamespace(remote=lambda pem: servers[0].endpoint("127.0.0.1", pem))
    pool = RayPool(lambda: SimpleNamespace(endpoint=endpoint))  # type: ignore[arg-type, return-value]
    await (await pool.connect(WORKER, "r")).close()
    await servers[0].close()
    with pytest.raises(PoolUnreachable, match="no connection to"):
        await pool.connect(WORKER, "r")
    del servers[0]
    await (await pool.connect(WORKER, "r")).close()
    await servers[0].close()


def test_a_search_for_the_actor_keeps_no_call_is_made_once_and_begins_again_when_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts are tokenized on the same few threads, so one may hang and no more."""
    monkeypatch.setattr("cluster.pool.ray_pool._ANSWER_S", 0.05)
    go_on = threading.Event()
    searches: list[int] = []

    async def test() -> None:
        def open_actor() -> Any:
            searches.append(1)
            if len(searches) > 1:
                return handle()
            assert go_on.wait(120)
            raise RpcError("the control plane restarts")

        pool = RayPool(open_actor)
        calls = [pool.status() for _ in range(10)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(answer, PoolUnreachable) for answer in answers)
        assert len(searches) <= 1
        opening = pool._opening
        assert opening is not None
        go_on.set()
        await asyncio.wait([opening])
        monkeypatch.setattr("cluster.pool.ray_pool._ANSWER_S", 100)
        assert await pool.status() == "up", "of a failure that nobody waited for"
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
