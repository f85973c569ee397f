"""Pools, their replicas and the sessions of one frontend, in one event loop without Ray."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from cluster.config import ClusterConfig
from cluster.config_sources import from_args
from cluster.frontend.pool_session import InFlightRequest, PoolSession, ShardRouter
from cluster.worker.worker import Worker
from scheduler.messages import FinishReason, Request
from tests.cluster.fakes import FakeReplica, perfect
from tests.cluster.wire import Wire, until

CONFIG = from_args(
    {
        "scheduler": {"rows_max": 4},
        "pool": {"lease_s": 1.0, "move_s": 0.1, "unreachable_s": 1000.0},
        "actors": {"drain_s": 20},
    }
)
TIMEOUT_S = 60.0
MOVE_S = CONFIG.pool.move_s
PROMPTS = [[10 + number, *range(40, 40 + number % 7)] for number in range(24)]


def with_pool(config: ClusterConfig, **settings: Any) -> ClusterConfig:
    """The same but for these settings of the pool."""
    return config.model_copy(update={"pool": config.pool.model_copy(update=settings)})


class Stuck(FakeReplica):
    """Ends no batch before it is let go, but for those that it may."""

    def __init__(self, may: int = 0) -> None:
        super().__init__()
        self.begun, self.let_go, self.ended = (threading.Event() for _ in range(3))
        self._may = may

    def step(self, batch: Any, *rest: Any) -> Any:
        if self._may:
            self._may -= 1
            return super().step(batch, *rest)
        self.begun.set()
        self.let_go.wait(120)
        result = super().step(batch, *rest)
        self.ended.set()
        return result


class Cluster:
    """Pools that can be lost or replaced, one frontend's sessions to all of them, and replicas."""

    def __init__(
        self,
        shards: int,
        config: ClusterConfig,
        loss: float,
        seed: int,
        frontend_clock: Callable[[], float],
        **options: Any,
    ) -> None:
        self.config = config = with_pool(config, shards=shards)
        self.wires = [Wire(config, loss, seed + shard, **options) for shard in range(shards)]
        self.router = ShardRouter(self.wires, config, "frontend", clock=frontend_clock)
        self.workers: list[Worker] = []
        self.fakes: list[FakeReplica] = []

    @property
    def wire(self) -> Wire:
        return self.wires[0]

    @property
    def session(self) -> PoolSession:
        return self.router.sessions[0]

    async def add_replica(
        self,
        shard: int = 0,
        fake: FakeReplica | None = None,
        step_s: float = 0.002,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> Worker:
        hosted = fake or FakeReplica(step_s, **options)
        name = f"replica{len(self.workers)}"
        worker = Worker(self.config, lambda: hosted, self.wires, name, hosted, shard, clock)
        await worker.start()
        self.fakes.append(hosted)
        self.workers.append(worker)
        return worker

    def submit(self, prompt: list[int], count: int, **options: Any) -> InFlightRequest:
        timeout_s = options.pop("timeout_s", TIMEOUT_S)
        return self.router.submit(Request("x", tuple(prompt), count, **options), timeout_s)

    async def until_serving(self, *serving: int) -> None:
        """And all pools have answered lately, as one that stood still with its world has not."""
        wanted = [(each, True) for each in serving]
        sessions = self.router.sessions
        await until(
            lambda: [(session.load.serving, session.load.answers) for session in sessions] == wanted
        )

    def live(self) -> list[int]:
        return [wire.snapshot.live for wire in self.wires]

    def reserved_blocks(self) -> int:
        return sum(replica.kv_blocks_used for replica in self.wire.snapshot.replicas)


@asynccontextmanager
async def shards(
    *replicas: int,
    config: ClusterConfig = CONFIG,
    loss: float = 0.0,
    seed: int = 0,
    step_s: float = 0.002,
    frontend_clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> AsyncIterator[Cluster]:
    """With so many replicas in each shard, whose steps take so long."""
    made = Cluster(len(replicas), config, loss, seed, frontend_clock, **options)
    made.router.start()
    try:
        async with asyncio.timeout(100):
            for shard, count in enumerate(replicas):
                for _ in range(count):
                    await made.add_replica(shard, step_s=step_s)
            if any(replicas):
                await made.until_serving(*replicas)
            yield made
    finally:
        for wire in made.wires:
            wire.loss = 0.0
        await made.router.close()
        for worker in made.workers:
            worker.end()
        for wire in made.wires:
            wire.close()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, 90) for _ in range(draw.randint(1, 30))] for _ in range(count)]


async def check(lives: list[InFlightRequest]) -> None:
    """All end, each with the tokens of an undisturbed run."""
    for live in lives:
        await live.ended.wait()
        assert live.finish is not None, (live.reject, live.cut)
        assert live.finish.reason is FinishReason.LENGTH
        assert live.tokens == perfect(live.request.prompt, live.request.max_new_tokens)
