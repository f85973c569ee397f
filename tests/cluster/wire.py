"""A pool in the same event loop as its workers and frontends: the real streams, without sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc

from cluster.config import ClusterConfig
from cluster.pool.actor import PoolActor
from cluster.pool.protocol import (
    FRONTEND,
    WORKER,
    FrontendMessage,
    PoolOverview,
    PoolUnreachable,
    PoolView,
)
from cluster.transport.stream import Stream, StreamKind
from scheduler.status import PoolStatus


class _Pipe:
    """Frames on their way from one side of a stream to the other; each is lost by chance, and the
    stream with it."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._frames: asyncio.Queue[Any] = asyncio.Queue()
        self.flows = wire.flows

    async def write(self, frame: bytes) -> None:
        if self._wire.draw() < self._wire.loss:
            self.end()
        else:
            self._frames.put_nowait(frame)

    async def read(self) -> Any:
        frame = await self._frames.get()
        if frame is grpc.aio.EOF:
            self._frames.put_nowait(frame)
        await self.flows.wait()
        return frame

    def end(self) -> None:
        self._frames.put_nowait(grpc.aio.EOF)


class Wire:
    """A PoolPort whose calls and streams are lost at random, and whose pool can be replaced."""

    def __init__(self, config: ClusterConfig, loss: float = 0.0, seed: int = 0, **options: Any):
        self._make: Callable[[], PoolActor] = lambda: PoolActor(config, **options)
        self.loss = loss
        self.draw = random.Random(seed).random
        self.flows = asyncio.Event()
        """While it is not set, nothing arrives on streams that are opened meanwhile."""
        self.flows.set()
        self.half_dead = False
        """Whether the pool lets every peer in, and ends every stream at once."""
        self.streams: list[tuple[StreamKind, str]] = []
        """Those that were opened."""
        self._ends: set[Callable[[], None]] = set()
        self._to_frontend: Stream | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.actor = self._make()

    @property
    def replicas(self) -> list[str]:
        """Those that the pool knows."""
        return [replica.id for replica in self.snapshot.replicas]

    def serves(self, replica_id: str) -> bool:
        """Whether the pool has this replica's stream."""
        worker = self.actor._workers.get(replica_id)
        return worker is not None and worker.stream is not None

    @property
    def frontends(self) -> list[str]:
        """Sessions that the pool knows."""
        return [*self.actor.frontends]

    @property
    def snapshot(self) -> PoolStatus:
        """Of the pool's scheduler."""
        return self.actor.scheduler.snapshot()

    def restart(self) -> None:
        """The pool's process ends, and a new one takes its place."""
        self.close()
        self.actor = self._make()

    def break_streams(self) -> None:
        """The network breaks once; the pool lives."""
        for end in self._ends:
            end()
        self._ends.clear()

    def close(self) -> None:
        for serving in self._serving:
            serving.cancel()
        self.break_streams()

    def say(self, *messages: FrontendMessage) -> None:
        """To the frontend that has connected last, as if they came from the pool."""
        assert self._to_frontend is not None
        self._to_frontend.send(*messages)

    async def join(self, *args: Any) -> str:
        return await self._call("join", *args)  # type: ignore[no-any-return]

    async def status(self) -> PoolView:
        return await self._call("status")  # type: ignore[no-any-return]

    async def overview(self) -> PoolOverview:
        return await self._call("overview")  # type: ignore[no-any-return]

    async def connect(self, kind: StreamKind, name: str) -> Stream:
        await asyncio.sleep(0)
        if self.draw() < self.loss:
            raise PoolUnreachable("the call was lost")
        self.streams.append((kind, name))
        there, back = _Pipe(self), _Pipe(self)

        def end() -> None:
            there.end()
            back.end()

        if self.half_dead:
            end()
            return Stream(kind.called, back.read, there.write, end)
        self._ends.add(end)
        serve = {WORKER: self.actor.serve_worker, FRONTEND: self.actor.serve_frontend}[kind]
        called = Stream(kind.calling, there.read, back.write)
        if kind is FRONTEND:
            self._to_frontend = called
        serving = asyncio.get_running_loop().create_task(serve(name, called))
        serving.add_done_callback(lambda _task: end())
        serving.add_done_callback(self._served)
        self._serving.add(serving)
        return Stream(kind.called, back.read, there.write, end)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled():
            task.exception()

    async def _call(self, method: str, *args: Any) -> Any:
        actor = self.actor
        if self.draw() < self.loss:
            raise PoolUnreachable("the call was lost")
        reply = await getattr(actor, method)(*args)
        if actor is not self.actor or self.draw() < self.loss:
            raise PoolUnreachable("the reply was lost")
        return reply


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what takes a moment, on a machine that may do a hundred other things."""
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.001)
