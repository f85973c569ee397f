"""The pool in its own process, and as seen through its handle: every Ray call to it stands here.

Ray's many ways to say that an actor did not answer become `PoolUnreachable`. The calls that come
with every batch go over a line (see `line`), which Ray leads to; where it cannot be opened they go
through Ray as well. The pool's process imports this module and no other with Ray in it, so that it
is back soon after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from cluster.config import ClusterConfig
from cluster.frontend.metrics import PoolMeter, ray_sink
from cluster.garbage import collect_seldom
from cluster.pool.actor import PoolActor
from cluster.pool.protocol import (
    JoinReply,
    NewsReply,
    PartReply,
    PoolUnreachable,
    PoolView,
    PullReply,
    StopReply,
    SubmitReply,
)
from cluster.transport.line import Door, Line, LineLost, LineServer, connect
from scheduler.messages import ReplicaSpec, StepFailed, StepResult, Submit

log = logging.getLogger("lockstep.pool")

_ANSWER_S = 5.0
"""How long any answer may take beyond the wait that was asked for."""
_NO_LINE_S = 30.0
"""How long after a line could not be opened it is tried again."""
_STOPPING_S = 60.0
"""How long the pool stays closed after it was last told to stop. A stop that was itself killed
leaves a pool that serves again."""
_STOP_LOOK_S = 0.05


class PoolProcess(PoolActor):
    """The pool as the class of a Ray actor."""

    def __init__(self, config: ClusterConfig) -> None:
        log_to_stderr()
        collect_seldom()
        super().__init__(config, process_lives, _leave, PoolMeter(ray_sink()))
        self._line = LineServer({"pull": self.pull, "submit": self.submit, "news": self.news})

    async def door(self) -> Door:
        """Where the line to this process begins. Raises OSError where none can be had."""
        return await self._line.door(ray.util.get_node_ip_address())


def _leave() -> None:
    ray.kill(this_process(), no_restart=True)


class RayPool:
    """Implements `PoolPort`; opens the actor again when it is gone for good."""

    def __init__(self, open_actor: Callable[[], ActorHandle], line: bool = True) -> None:
        """`open_actor` finds the actor or creates it; without `line` all calls go through Ray."""
        self._open_actor = open_actor
        self._actor: ActorHandle | None = None
        self._opening: asyncio.Task[ActorHandle] | None = None
        self._line: Line | None = None
        self._connecting: asyncio.Task[Line | None] | None = None
        self._no_line_until_s = 0.0 if line else math.inf
        self._failed_before = False
        """Whether the last attempt to open the line found none."""

    async def join(self, replica_id: str, spec: ReplicaSpec, process: Any) -> JoinReply:
        reply: JoinReply = await self._call("join", replica_id, spec, process)
        return reply

    async def pull(
        self,
        replica_id: str,
        acknowledged: int,
        results: Sequence[StepResult | StepFailed],
        wait_s: float,
    ) -> PullReply:
        reply: PullReply = await self._quick(
            "pull", replica_id, acknowledged, results, wait_s, wait_s=wait_s
        )
        return reply

    async def drain(self, replica_id: str) -> None:
        await self._call("drain", replica_id)

    async def leave(self, replica_id: str, blamed: bool = False) -> None:
        await self._call("leave", replica_id, blamed)

    async def submit(
        self,
        ingress_id: str,
        submits: Sequence[Submit],
        cancels: Sequence[str],
        unfinished: int = 0,
    ) -> SubmitReply:
        reply: SubmitReply = await self._quick("submit", ingress_id, submits, cancels, unfinished)
        return reply

    async def news(
        self, ingress_id: str, acknowledged: int, wait_s: float, unfinished: int = 0
    ) -> NewsReply:
        reply: NewsReply = await self._quick(
            "news", ingress_id, acknowledged, wait_s, unfinished, wait_s=wait_s
        )
        return reply

    async def part(self, ingress_id: str) -> PartReply:
        reply: PartReply = await self._call("part", ingress_id)
        return reply

    async def status(self) -> PoolView:
        view: PoolView = await self._call("status")
        return view

    async def stop_accepting(self, for_s: float, cut: bool = False) -> StopReply:
        reply: StopReply = await self._call("stop_accepting", for_s, cut)
        return reply

    async def _quick(self, method: str, *args: Any, wait_s: float = 0.0) -> Any:
        """Over the line if there is one."""
        line = await self._connected()
        if line is None:
            return await self._call(method, *args, wait_s=wait_s)
        try:
            return await line.call(method, args, wait_s + _ANSWER_S)
        except LineLost as error:
            line.close()
            raise PoolUnreachable(str(error)) from error

    async def _connected(self) -> Line | None:
        """The line, opened again if it was lost."""
        if self._line is not None and not self._line.lost:
            return self._line
        loop = asyncio.get_running_loop()
        if loop.time() < self._no_line_until_s:
            return None
        if self._connecting is None:
            self._connecting = loop.create_task(self._connect())
            self._connecting.add_done_callback(self._connected_or_not)
        if self._failed_before:
            # It may take its time again; meanwhile there is Ray's way.
            return None
        # Several calls may wait for the same line, and each may be cancelled.
        return await asyncio.shield(self._connecting)

    def _connected_or_not(self, task: asyncio.Task[Line | None]) -> None:
        self._connecting = None
        if not task.cancelled():
            # Whoever waited for it has the error; nobody may have.
            task.exception()

    async def _connect(self) -> Line | None:
        try:
            self._line = await connect(await self._call("door"))
        except OSError as error:
            log.warning("no line to the pool, its calls go through Ray: %s", error)
            self._line = None
            self._failed_before = True
            self._no_line_until_s = asyncio.get_running_loop().time() + _NO_LINE_S
        else:
            self._failed_before = False
        return self._line

    async def _call(self, method: str, *args: Any, wait_s: float = 0.0) -> Any:
        try:
            actor = self._actor or await self._found()
            async with asyncio.timeout(wait_s + _ANSWER_S):
                return await getattr(actor, method).remote(*args)
        except RayTaskError:
            # The pool did answer, that it has a fault; it is of the fault's own type, too.
            raise
        except ActorDiedError as error:
            self._actor = None
            raise PoolUnreachable(str(error)) from error
        except (TimeoutError, ValueError) as error:
            raise PoolUnreachable(str(error)) from error
        except RayError as error:
            # There are many: the reply may have been lost with its node, the control plane restart.
            raise PoolUnreachable(str(error)) from error

    async def _found(self) -> ActorHandle:
        """Finding or creating an actor blocks on Ray's control plane: on one thread, for all calls.

        Raises TimeoutError while it takes its time, and whatever Ray raises.
        """
        if self._opening is None:
            opening = asyncio.to_thread(self._open_actor)
            self._opening = asyncio.get_running_loop().create_task(opening)
            self._opening.add_done_callback(self._found_or_not)
        async with asyncio.timeout(_ANSWER_S):
            return await asyncio.shield(self._opening)

    def _found_or_not(self, task: asyncio.Task[ActorHandle]) -> None:
        self._opening = None
        # Whoever waited for it has the error; nobody may have.
        if not task.cancelled() and task.exception() is None:
            self._actor = task.result()


def stop_pools(actors: Sequence[ActorHandle], grace_s: float, silent_s: float) -> None:
    """Let the pools refuse what is new, and wait until they have finished the rest.

    What is unfinished after `grace_s` ends as UNAVAILABLE, so that clients go elsewhere with it.
    All pools are asked until none has anything: requests may move to one that had nothing before.
    One that hangs is asked no more after `silent_s`, the time within which every ingress talks to
    every pool: what an ingress has there counts in what it tells the others.
    """
    deadline_s = time.monotonic() + grace_s
    pools = [_StoppingPool(actor) for actor in actors]
    while pools:
        now_s = time.monotonic()
        cut = now_s >= deadline_s
        heard = [pool for pool in pools if pool.silent_for(now_s) < silent_s]
        for pool in pools:
            pool.ask(cut, now_s)
        # One that hangs must not keep the end of the grace time from the others.
        waited = [pool.asked for pool in (pools if cut else heard or pools)]
        patience_s = _ANSWER_S if cut else min(silent_s, deadline_s - now_s)
        ray.wait(waited, num_returns=len(waited), timeout=patience_s)
        for pool in pools:
            pool.look()
        if cut:
            return
        # Nobody speaks for those that hang where all of them do, or are gone.
        witness = any(pool.answered for pool in heard) or all(pool.gone for pool in pools)
        if witness and not any(pool.unfinished for pool in heard):
            return
        time.sleep(_STOP_LOOK_S)


class _StoppingPool:
    """One pool that is told to stop, and what is known of it."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor
        self.asked: ray.ObjectRef[StopReply] | None = None
        self._cut = False
        self._silent_since_s: float | None = None
        """When it was asked what it has not answered yet."""
        self.answered = self.gone = False
        """The last time that it was looked for."""
        self.unfinished = True
        """Whether it must be asked again; it is not so when it has nothing left, or is gone."""

    def silent_for(self, now_s: float) -> float:
        return 0.0 if self._silent_since_s is None else now_s - self._silent_since_s

    def ask(self, cut: bool, now_s: float) -> None:
        """Unless it has been asked the same and may still answer."""
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        if self.asked is None or cut != self._cut:
            self._cut = cut
            self.asked = self._actor.stop_accepting.remote(_STOPPING_S, cut)

    def look(self) -> None:
        """Take its answer, if there is one by now."""
        self.answered = self.gone = False
        self.unfinished = True
        try:
            reply = ray.get(self.asked, timeout=0)
            self.answered = True
            self.unfinished = bool(reply.unfinished) or not reply.settled
            self._silent_since_s = None
        except GetTimeoutError:
            return
        except ActorDiedError:
            self.gone, self.unfinished = True, False
        except RayError as error:
            log.warning("the pool does not answer while it is stopped: %s", error)
        self.asked = None


async def process_lives(process: ActorHandle) -> bool:
    """Whether the actor's process lives; True while Ray cannot tell."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            await process.__ray_ready__.remote()
    except ActorDiedError:
        return False
    except (RayError, TimeoutError):
        return True
    return True


def this_process() -> ActorHandle:
    """The handle of the actor that this code runs in."""
    handle: ActorHandle = ray.get_runtime_context().current_actor
    return handle


def log_to_stderr() -> None:
    """Our log into the process's own file, from where Ray forwards it."""
    logger = logging.getLogger("lockstep")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
