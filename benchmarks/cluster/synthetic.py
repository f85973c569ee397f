"""The cluster alone: synthetic replicas through gRPC over the same replicas in virtual time.

    python -m benchmarks.cluster.synthetic [--replicas 1 4 16] [--in-flight 1 4 16 64] [--json FILE]

For each number of replicas a cluster is started on this machine, and for each number of clients a
closed loop of unary calls and one of streams runs against it. Every answer is compared with the
right tokens. The ratio's base is `benchmarks.cluster.ideal`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import ray

from benchmarks.cluster.ideal import ideal
from benchmarks.cluster.load import WAYS, Load, Served, percentiles, through_grpc
from benchmarks.report import machine, table, write_json
from benchmarks.synthetic import Speed, synthetic_loader
from cluster import app
from cluster.client import NO_RETRY, AsyncClient
from cluster.config import ClusterConfig, from_args
from cluster.target_text import TargetText
from scheduler.fake_replica import perfect_world
from scheduler.messages import ReplicaSpec, Request

LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of the prompts, in turn."""
HEADER = ("replicas", "in flight", "ideal tokens/s", *(f"{way} / ideal" for way in WAYS))


def load_of(spec: ReplicaSpec, in_flight: int, requests: int, new_tokens: int) -> Load:
    rng = Random(0)
    prompts = [
        [rng.randrange(spec.vocab_size) for _ in range(LENGTHS[number % len(LENGTHS)])]
        for number in range(requests)
    ]
    return Load(prompts, new_tokens, in_flight)


def check(served: Served, load: Load, spec: ReplicaSpec) -> None:
    """Raises AssertionError for a wrong token."""
    for prompt, tokens in zip(load.prompts, served.tokens, strict=True):
        expected, _ = perfect_world(Request("", tuple(prompt), load.new_tokens), spec.vocab_size)
        assert tuple(tokens) == expected, "a wrong token"


def order_counter(config: ClusterConfig) -> Callable[[], int]:
    """Asks the pool's actor how many orders it has given."""
    actor = ray.get_actor(config.pool_name, namespace=config.pool.namespace)

    def count() -> int:
        view = ray.get(actor.status.remote())
        return sum(replica.orders for replica in view.status.replicas)

    return count


async def measure(
    config: ClusterConfig, spec: ReplicaSpec, speed: Speed, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """One entry per number of clients; the cluster serves."""
    entries = []
    client = AsyncClient(f"localhost:{config.server.grpc_port}", retry=NO_RETRY)
    try:
        await client.wait_until_ready(120)
        while len((await client.status()).replicas) < config.replicas:
            await asyncio.sleep(0.1)
        count = order_counter(config)
        for stream in (False, True):  # warm-up of every process on the way
            await through_grpc(client, load_of(spec, 16, 4 * config.replicas, 32), stream)
        for in_flight in args.in_flight:
            load = load_of(spec, in_flight, args.requests_per_client * in_flight, args.new_tokens)
            best = ideal(load, spec, speed, config.replicas, config.scheduler)
            runs: dict[str, list[Served]] = {way: [] for way in WAYS}
            for _ in range(args.rounds):
                for way in WAYS:
                    served = await through_grpc(client, load, way == "stream", count)
                    check(served, load, spec)
                    runs[way].append(served)
            entry: dict[str, Any] = {
                "replicas": config.replicas,
                "in_flight": in_flight,
                "requests": len(load.prompts),
                "ideal": {
                    "tokens_per_s": round(best.tokens_per_s, 1),
                    "latency_s": percentiles(best.latencies_s),
                },
            }
            for way in WAYS:
                ratios = [served.tokens_per_s / best.tokens_per_s for served in runs[way]]
                entry[way] = {
                    "ratio": round(median(ratios), 3),
                    "rounds": [served.figures() for served in runs[way]],
                }
            print(config.replicas, in_flight, {way: entry[way] for way in WAYS}, flush=True)
            entries.append(entry)
    finally:
        await client.close()
    return entries


def main() -> None:
    """Parse the command line; for each number of replicas start, measure, stop a cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--prefill-token-ms", type=float, default=0.03)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--requests-per-client", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--grpc-port", type=int, default=9240)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    step_s = args.step_ms / 1000
    speed = Speed(step_s, step_s, 0.0, args.acceptance, args.prefill_token_ms / 1000)
    entries: list[dict[str, Any]] = []
    for replicas in args.replicas:
        config = from_args(
            {
                "replicas": replicas,
                "pool": {"name": "cluster-benchmark"},
                "grpc_port": args.grpc_port,
                "http_port": args.grpc_port + 1,
            }
        )
        text = TargetText.load(config.replica)
        spec = ReplicaSpec(
            kv_blocks=4000,
            block_size=16,
            context_len=text.context_len,
            vocab_size=text.spec.vocab_size,
            target="synthetic",
        )
        cluster = app.ClusterRun(config)
        try:
            cluster.start(app.build_app(config, load=synthetic_loader(spec, speed)), quiet=True)
            entries += asyncio.run(measure(config, spec, speed, args))
        finally:
            cluster.stop(at_once=True)
    rows = [
        (
            entry["replicas"],
            entry["in_flight"],
            entry["ideal"]["tokens_per_s"],
            *(entry[way]["ratio"] for way in WAYS),
        )
        for entry in entries
    ]
    print(machine())
    print(table(HEADER, rows))
    settings = {
        "speed": vars(speed),
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
    }
    write_json(args.json, {**settings, "runs": entries})


if __name__ == "__main__":
    main()
