"""What pool processes take of the CPU per batch and per request.

The pools run in processes of their own, as their Ray actors do, but without Ray; they are reached
over the transport. This process is all replicas and one frontend. Where steps take no time, batches
come as fast as two cores allow, and one core over the CPU time per batch is what one pool can
give. Where they take some, each of several pools has the load that one has alone, and the busiest
one's CPU time says how much more they give together, with a core for each.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from random import Random
from typing import Any

import uvloop

from benchmarks.cluster.load import process_cpu_s
from benchmarks.synthetic import Speed, SyntheticReplica
from cluster.config import ClusterConfig, from_args
from cluster.pool.actor import PoolActor
from cluster.pool.protocol import FRONTEND, WORKER, PoolPort
from cluster.pool.shard_router import ShardRouter
from cluster.transport.codec import Messages
from cluster.transport.credentials import Key
from cluster.transport.endpoint import Endpoint, Server, connect
from cluster.transport.stream import Stream, StreamKind
from cluster.worker.worker import Worker
from scheduler.messages import ReplicaSpec, Request
from scheduler.scaling import shard_of_rank
from scheduler.simulation import reference_output

SPEC = ReplicaSpec(kv_blocks=4000, block_size=16, context_len=1024, vocab_size=4096)
NEW_TOKENS = 128
_RARE = StreamKind("Rare", calling=Messages(bytes), called=Messages(bytes))
"""What Ray carries in a cluster, pickled."""
_HOST = "127.0.0.1"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""The unit of CPU time; less than one is measured as none."""


class DirectPool:
    """Implements PoolPort without Ray."""

    def __init__(self, key: Key, endpoint: Endpoint, rare: Stream) -> None:
        self._key = key
        self._endpoint = endpoint
        self._rare = rare
        self._replies = rare.frames()
        self._one = asyncio.Lock()

    async def connect(self, kind: StreamKind, name: str) -> Stream:
        return await connect(self._endpoint, self._key, kind, name)

    async def close(self) -> None:
        await self._rare.close()

    def __getattr__(self, method: str) -> Any:
        async def call(*args: Any) -> Any:
            async with self._one:
                self._rare.send(pickle.dumps((method, args)))
                (reply,) = await anext(self._replies)
                return pickle.loads(reply)

        return call


def host_pool(pipe: Pipe, config: ClusterConfig) -> None:
    """A process with one pool; is told a caller's key, says where it is, and ends when it is asked
    anything more."""

    async def serve() -> None:
        actor = PoolActor(config)

        async def rare(_name: str, stream: Stream) -> None:
            async for (call,) in stream.frames():
                method, args = pickle.loads(call)
                stream.send(pickle.dumps(await getattr(actor, method)(*args)))

        server = Server({WORKER: actor.serve_worker, FRONTEND: actor.serve_frontend, _RARE: rare})
        pipe.send(await server.endpoint(_HOST, pipe.recv()))
        await asyncio.to_thread(pipe.recv)
        await server.close()

    uvloop.run(serve())


async def drive(
    config: ClusterConfig,
    key: Key,
    endpoints: Sequence[Endpoint],
    pids: Sequence[int],
    replicas: int,
    requests: int,
    step_s: float,
) -> dict[str, Any]:
    """Serves a part of the requests to warm up, then all; figures of the second time."""
    speed = Speed(step_s, step_s, start_s=0.0, acceptance=0.7)
    rng = Random(0)
    pools = [DirectPool(key, one, await connect(one, key, _RARE, "rare")) for one in endpoints]
    workers = [
        Worker(
            config,
            lambda: SyntheticReplica(SPEC, speed),
            pools,
            f"replica{rank}",
            shard=shard_of_rank(rank, len(pools)),
        )
        for rank in range(replicas)
    ]
    for worker in workers:
        await worker.start()
    router = ShardRouter(pools, config.pool_names, "frontend", config.pool.beat_s)
    router.start()
    asked = [
        Request("", tuple(rng.randrange(SPEC.vocab_size) for _ in range(64)), NEW_TOKENS)
        for _ in range(requests)
    ]
    batches, cpu_s, seconds = [0] * len(pools), [0.0] * len(pools), 0.0
    for some in (asked[: requests // 4], asked):
        while len((await router.status()).status.replicas) < replicas:
            await asyncio.sleep(0.05)
        batches_before, cpu_before_s = await _batches(pools), [process_cpu_s(pid) for pid in pids]
        start = time.perf_counter()
        lives = [router.submit(request, 600.0) for request in some]
        for live in lives:
            await live.ended.wait()
        seconds = time.perf_counter() - start
        cpu_s = [
            process_cpu_s(pid) - before for pid, before in zip(pids, cpu_before_s, strict=True)
        ]
        after = await _batches(pools)
        batches = [now - before for now, before in zip(after, batches_before, strict=True)]
        for request, live in zip(some, lives, strict=True):
            expected, _ = reference_output(request, SPEC.vocab_size)
            assert tuple(live.tokens) == expected, "a wrong token"
    await router.close()
    for worker in workers:
        await worker.close()
    for pool in pools:
        await pool.close()
    return {
        "shards": len(pools),
        "replicas": replicas,
        "step_s": step_s,
        "requests": requests,
        "batches": batches,
        "batches_per_s": round(sum(batches) / seconds),
        "cpu_s": [round(each, 2) for each in cpu_s],
        "cpu_us_per_batch": round(1e6 * sum(cpu_s) / sum(batches)),
        "cpu_us_per_request": round(1e6 * sum(cpu_s) / requests),
        "batches_per_cpu_s_of_the_busiest": round(sum(batches) / max(*cpu_s, _TICK_S)),
    }


async def _batches(pools: Sequence[PoolPort]) -> list[int]:
    views = [await pool.status() for pool in pools]
    return [view.status.figures.batches for view in views]


def measure_pool(shards: int, replicas: int, requests: int, step_s: float) -> dict[str, Any]:
    """Starts so many pool processes, serves the requests, ends them."""
    config = from_args({"pool": {"shards": shards, "lease_s": 30.0, "beat_s": 5.0}})
    context = multiprocessing.get_context("spawn")
    key = Key()
    processes, pipes = [], []
    for _ in range(shards):
        pipe, theirs = context.Pipe()
        process = context.Process(target=host_pool, args=(theirs, config), daemon=True)
        process.start()
        processes.append(process)
        pipes.append(pipe)
    try:
        for pipe in pipes:
            pipe.send(key.public_pem)
        endpoints = [pipe.recv() for pipe in pipes]
        pids = [process.pid or 0 for process in processes]
        return uvloop.run(drive(config, key, endpoints, pids, replicas, requests, step_s))
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join(10)


def measure_pools(shards: int, replicas: int, requests: int, step_s: float) -> dict[str, Any]:
    """One pool at its limit; then one, and several with as many replicas and requests each."""
    limit = measure_pool(1, replicas, requests, 0.0)
    one = measure_pool(1, replicas, requests, step_s)
    several = measure_pool(shards, shards * replicas, shards * requests, step_s)
    key = "batches_per_cpu_s_of_the_busiest"
    return {
        "limit": limit,
        "one": one,
        "several": several,
        # Were all pools alike, and a core for each: how evenly requests and replicas are shared.
        "several_over_one_by_batches": round(sum(several["batches"]) / max(several["batches"]), 2),
        # The same with what each took, here, where they share the cores with each other.
        "several_over_one_by_cpu": round(several[key] / one[key], 2),
    }
