"""The pool in its own process, and as seen from others: every Ray call to it stands here.

Ray's many ways to say that an actor did not answer become `PoolUnreachable`. What comes with every
batch goes over streams, to which Ray leads; rare calls are Ray's. The pool's process imports this
module and no other with Ray in it, so that it is back soon after a restart.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ClusterConfig
from cluster.metrics import PoolMeter
from cluster.metrics.log import log_to_stderr
from cluster.metrics.ray_sink import ray_sink
from cluster.pool.actor import PoolActor
from cluster.pool.protocol import (
    FRONTEND,
    NAMESPACE,
    WORKER,
    PoolOverview,
    PoolUnreachable,
    PoolView,
    StopReply,
)
from cluster.transport import Endpoint, Key, Server, Stream, StreamKind, connect
from scheduler.messages import ReplicaSpec

log = logging.getLogger("lockstep.pool")

_ANSWER_S = 5.0
"""How long any answer may take."""
_ALIVE_S = 1.0
"""How long the answer of a process may take that has nothing to do but to say that it lives."""
_UNFINISHED_S = 1.0
"""How long the pools may take to say what is unfinished."""
_CUT_S = 5.0
"""How long they may take to cut it."""
_STOPPING_S = 60.0
"""How long a pool stays closed after it was last told to stop. A stop that was itself killed leaves
a pool that serves again."""
_LOOK_S = 0.05
_PREFERRED_NODES = ("lockstep_pool", "node:__internal_head__")
"""A Ray resource of the nodes that a pool should be on, the first one that any node has. The second
is the head node's: it is no spot node, and without it the cluster is lost anyway."""


class PoolProcess(PoolActor):
    """The pool as the class of a Ray actor."""

    def __init__(self, config: ClusterConfig) -> None:
        log_to_stderr(config.server.log_format)
        collect_seldom()
        super().__init__(
            config, process_lives, _leave, _abort, PoolMeter(ray_sink(config.model_name))
        )
        self._server = Server({WORKER: self.serve_worker, FRONTEND: self.serve_frontend})

    async def endpoint(self, public_pem: bytes) -> Endpoint:
        """For the caller with this key. Raises OSError where no port can be had."""
        return await self._server.endpoint(ray.util.get_node_ip_address(), public_pem)


def _leave() -> None:
    ray.kill(this_process(), no_restart=True)


def _abort() -> None:
    # Ray starts an actor anew whose process has ended like this.
    os._exit(1)


def open_pool(config: ClusterConfig, name: str) -> ActorHandle:
    """Finds the actor of a shard, or creates it. It outlives its creator and leaves when idle."""
    actor: ActorHandle = (
        ray.remote(PoolProcess)
        .options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
            scheduling_strategy=_placement(),
        )
        .remote(config)
    )
    return actor


def _placement() -> Any:
    """Where to create a pool: never in the placement group of a replica that happens to do it, and
    on a GPU or spot node only if there is no other."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    for resource in _PREFERRED_NODES:
        for node in nodes:
            if resource in node["Resources"]:
                return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
    return "DEFAULT"


class RayPool:
    """Implements `PoolPort`; opens the actor again when it is gone for good."""

    def __init__(self, open_actor: Callable[[], ActorHandle]) -> None:
        """`open_actor` finds the actor or creates it."""
        self._open_actor = open_actor
        self._actor: ActorHandle | None = None
        self._opening: asyncio.Task[ActorHandle] | None = None
        self._key = Key()

    async def join(self, replica_id: str, spec: ReplicaSpec, process: Any) -> str:
        refused: str = await self._call("join", replica_id, spec, process)
        return refused

    async def connect(self, kind: StreamKind, name: str) -> Stream:
        endpoint: Endpoint = await self._call("endpoint", self._key.public_pem)
        try:
            return await connect(endpoint, self._key, kind, name)
        except OSError as error:
            raise PoolUnreachable(str(error)) from error

    async def status(self) -> PoolView:
        view: PoolView = await self._call("status")
        return view

    async def overview(self) -> PoolOverview:
        overview: PoolOverview = await self._call("overview")
        return overview

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            actor = self._actor or await self._found()
            async with asyncio.timeout(_ANSWER_S):
                return await getattr(actor, method).remote(*args)
        except (TimeoutError, ValueError, RayError) as error:
            # Ray's are many: the reply may have been lost with its node, the control plane restart,
            # and the pool's own fault is one, too.
            if isinstance(error, ActorDiedError):
                self._actor = None
            raise PoolUnreachable(str(error)) from error

    async def _found(self) -> ActorHandle:
        """Finding or creating an actor blocks on Ray's control plane: on one thread, for all calls.

        Raises TimeoutError while it takes its time, and whatever Ray raises.
        """
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(self._open_actor))
            self._opening.add_done_callback(self._found_or_not)
        async with asyncio.timeout(_ANSWER_S):
            return await asyncio.shield(self._opening)

    def _found_or_not(self, task: asyncio.Task[ActorHandle]) -> None:
        self._opening = None
        # What waited for it has the error, if anything did.
        if not task.cancelled() and task.exception() is None:
            self._actor = task.result()


def stop_pools(actors: Sequence[ActorHandle], grace_s: float) -> None:
    """Let the pools refuse what is new, and wait until they have finished the rest: blocking, from
    where the server is stopped.

    What is unfinished after `grace_s` ends as UNAVAILABLE, so that clients go elsewhere with it.
    All pools are asked until none has anything: requests may move to one that had nothing before.
    """
    deadline_s = time.monotonic() + grace_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        if _nothing_left(actors, min(_UNFINISHED_S, left_s)):
            return
        time.sleep(_LOOK_S)
    _nothing_left(actors, _CUT_S, cut=True)


def _nothing_left(actors: Sequence[ActorHandle], within_s: float, cut: bool = False) -> bool:
    """Tells all pools at once, so that one that hangs keeps nothing from the others; whether each
    has said in time that nothing is unfinished."""
    asked = [actor.stop_admitting.remote(_STOPPING_S, cut) for actor in actors]
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=within_s)
    return all(map(_finished, asked))


def _finished(asked: ray.ObjectRef[StopReply]) -> bool:
    try:
        reply = ray.get(asked, timeout=0)
    except GetTimeoutError:
        return False
    except ActorDiedError:
        return True
    except RayError as error:
        log.warning("the pool does not answer while it is stopped: %s", error)
        return False
    return reply.settled and not reply.unfinished


async def process_lives(process: ActorHandle) -> bool:
    """Whether the actor's process answers Ray: one that has died or stands still does not."""
    try:
        async with asyncio.timeout(_ALIVE_S):
            await process.__ray_ready__.remote()
    except (RayError, TimeoutError):
        return False
    return True


def this_process() -> ActorHandle:
    """The handle of the actor that this code runs in."""
    handle: ActorHandle = ray.get_runtime_context().current_actor
    return handle


def collect_seldom() -> None:
    """Let Python's cyclic garbage collector look seldom, and never at what this process has now.

    A pool makes thousands of objects per second that go by their reference count, and keeps
    hundreds of thousands; a replica has as many of the libraries that it is built on.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
