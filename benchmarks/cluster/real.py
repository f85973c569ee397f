"""A real pair through gRPC over the same engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.cluster.load import (
    WAYS,
    Base,
    Load,
    batch_counter,
    clients_of,
    compare,
    fresh_salt,
    run,
)
from benchmarks.prompts import benchmark_tokens
from cluster import app
from cluster.config import ClusterConfig
from cluster.frontend.target_text import TargetText
from cluster.local_engine import LocalEngine, Output
from replicas.replica import Replica
from scheduler.messages import Request


def in_process(replica: Replica, config: ClusterConfig, load: Load) -> Base:
    """The engine alone with so many requests in flight."""
    engine = LocalEngine(replica, config.scheduler)
    salt = fresh_salt()
    start = perf_counter()
    outputs: list[Output] = []
    running = 0
    for number, prompt in enumerate(load.prompts):
        while running >= load.in_flight:
            engine.advance()
            running = sum(output.reason is None for output in outputs)
        request = Request(str(number), tuple(prompt), load.new_tokens, cache_salt=salt)
        outputs.append(engine.submit(request))
        running += 1
    engine.run()
    seconds = perf_counter() - start
    tokens = [output.tokens for output in outputs]
    latencies = tuple((output.finished_s or 0.0) - output.submitted_s for output in outputs)
    return Base(sum(map(len, tokens)) / seconds, latencies, tokens)


def measure_real(
    config: ClusterConfig,
    prompts_file: Path | None,
    in_flight: Sequence[int],
    requests_per_client: int,
    new_tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Starts a cluster; one entry per number of clients. Its base is one engine in this process,
    however many replicas the cluster has."""
    replica = Replica.load(config.replica)
    text = TargetText.load(config.replica)
    most = replica.spec.context_len - new_tokens
    prompts = benchmark_tokens(text.encoder, 64, prompts_file, most)

    async def measure() -> list[dict[str, Any]]:
        entries = []
        async with clients_of(config) as clients:
            warm_up = Load(prompts[:16], 32, 16)
            for way in WAYS:
                await run(clients, warm_up, way)
            in_process(replica, config, warm_up)
            for number in in_flight:
                requests = min(max(8, requests_per_client * number), len(prompts))
                load = Load(prompts[:requests], new_tokens, number)
                entry = await compare(
                    clients,
                    load,
                    lambda: in_process(replica, config, load),  # noqa: B023
                    rounds,
                    batch_counter(config),
                )
                entries.append({"replicas": config.replicas, **entry})
                print(entries[-1], flush=True)
        return entries

    cluster = app.ClusterRun(config)
    try:
        cluster.start(quiet=True)
        return asyncio.run(measure())
    finally:
        cluster.stop()
