"""The cluster alone: synthetic replicas through gRPC over the same replicas in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

from benchmarks.cluster.ideal import ideal
from benchmarks.cluster.load import WAYS, Load, batch_counter, clients_of, compare, run
from benchmarks.synthetic import Speed, synthetic_loader, synthetic_spec
from cluster import app
from cluster.config import ClusterConfig
from scheduler.messages import ReplicaSpec

LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of the prompts, in turn."""


def load_of(spec: ReplicaSpec, in_flight: int, requests: int, new_tokens: int) -> Load:
    """Prompts of random tokens."""
    rng = Random(0)
    prompts = [
        [rng.randrange(spec.vocab_size) for _ in range(LENGTHS[number % len(LENGTHS)])]
        for number in range(requests)
    ]
    return Load(prompts, new_tokens, in_flight)


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

    async def measure() -> list[dict[str, Any]]:
        entries = []
        async with clients_of(config) as clients:
            for way in WAYS:  # warm-up of every process on the way
                warm_up = load_of(spec, 16, 4 * config.replicas, 32)
                await run(clients, warm_up, way)
            for number in in_flight:
                load = load_of(spec, number, requests_per_client * number, new_tokens)
                best = ideal(load, spec, speed, config.replicas, config.scheduler)
                entry = await compare(clients, load, lambda: best, rounds, batch_counter(config))  # noqa: B023
                entries.append({"replicas": config.replicas, **entry})
                print(entries[-1], flush=True)
        return entries

    cluster = app.ClusterRun(config)
    try:
        cluster.start(app.build_app(config, load=synthetic_loader(spec, speed)), quiet=True)
        return asyncio.run(measure())
    finally:
        cluster.stop()
