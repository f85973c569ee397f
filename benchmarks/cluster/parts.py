"""A closed loop through the cluster over the same work without it: a real pair, synthetic replicas.

A real pair's base is one engine in this process, however many replicas the cluster has; that of
synthetic replicas is the same scheduler over as many of them in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.cluster.closed_loop import WAYS, Base, Load, batch_counter, clients_of, compare, run
from benchmarks.cluster.ideal import ideal
from benchmarks.shared.prompts import HELD_OUT_LENGTHS, benchmark_tokens
from benchmarks.shared.synthetic import Speed, synthetic_loader, synthetic_spec
from cluster import app
from cluster.bench.arrivals import Closed, Extent, drive
from cluster.bench.engine import over_engine
from cluster.bench.figures import latencies
from cluster.bench.workload import engine_request, synthetic_prompts
from cluster.config import ClusterConfig
from cluster.frontend.target_text import TargetText
from cluster.local.engine import LocalEngine
from cluster.run import ClusterRun
from replicas.replica import Replica
from scheduler.messages import ReplicaSpec, Request


def measure_real(
    config: ClusterConfig,
    prompts_file: Path | None,
    in_flight: Sequence[int],
    requests_per_client: int,
    new_tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Starts a cluster; one entry per number of clients."""
    replica = Replica.load(config.replica)
    text = TargetText.load(config.replica)
    most = replica.spec.context_len - new_tokens
    prompts = benchmark_tokens(text.encoder, 64, prompts_file, most)

    def load(number: int) -> Load:
        requests = min(max(8, requests_per_client * number), len(prompts))
        return Load(prompts[:requests], new_tokens, number)

    async def base(load: Load) -> Base:
        return await in_process(replica, config, load)

    warm_up = Load(prompts[:16], 32, 16)
    asyncio.run(base(warm_up))
    return _measure(config, None, warm_up, [load(number) for number in in_flight], base, rounds)


def measure_synthetic(
    config: ClusterConfig,
    speed: Speed,
    in_flight: Sequence[int],
    requests_per_client: int,
    new_tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Starts a cluster; one entry per number of clients."""
    spec = synthetic_spec(config.replica)
    warm_up = load_of(spec, 16, 4 * config.replicas, 32)
    loads = [load_of(spec, count, requests_per_client * count, new_tokens) for count in in_flight]
    bests = {
        load.in_flight: ideal(load, spec, speed, config.replicas, config.scheduler)
        for load in loads
    }

    async def base(load: Load) -> Base:
        return bests[load.in_flight]

    served = app.build_app(config, load=synthetic_loader(spec, speed))
    return _measure(config, served, warm_up, loads, base, rounds)


def _measure(
    config: ClusterConfig,
    served: Any,
    warm_up: Load,
    loads: Sequence[Load],
    base: Callable[[Load], Awaitable[Base]],
    rounds: int,
) -> list[dict[str, Any]]:
    """`served`: the application of Serve, None for the usual one. One entry per load."""

    async def measure() -> list[dict[str, Any]]:
        entries = []
        async with clients_of(config) as clients:
            for way in WAYS:  # of every process on the way
                await run(clients, warm_up, way)
            for load in loads:
                entry = await compare(clients, load, base, rounds, batch_counter(config))
                entries.append({"replicas": config.replicas, **entry})
                print(entries[-1], flush=True)
        return entries

    cluster = ClusterRun(config)
    try:
        cluster.start(served, quiet=True)
        return asyncio.run(measure())
    finally:
        cluster.stop()


async def in_process(replica: Replica, config: ClusterConfig, load: Load) -> Base:
    """The engine alone with so many requests in flight."""
    engine = LocalEngine(replica, config.scheduler)
    workload, count = load.workload(), len(load.prompts)

    def request(number: int) -> Request:
        return engine_request(workload, number, encode=lambda _text: (), eos=())

    send = over_engine(engine, request)
    records = await drive(send, Closed(load.in_flight), Extent(requests=count))
    spent_s = max(record.end_s or 0.0 for record in records)
    tokens = [output.tokens for output in engine.outputs.values()]  # in the order of sending
    return Base(sum(map(len, tokens)) / spent_s, tuple(latencies(records)), tokens)


def load_of(spec: ReplicaSpec, in_flight: int, requests: int, new_tokens: int) -> Load:
    """Prompts of random tokens, as long as those of held-out text."""
    lengths = cycle(HELD_OUT_LENGTHS)
    prompts = synthetic_prompts(requests, lambda _rng: next(lengths), spec.vocab_size, seed=0)
    return Load(prompts, new_tokens, in_flight)
