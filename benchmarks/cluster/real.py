"""What the cluster costs: tokens/s through gRPC over the same engine in one process.

    python -m benchmarks.cluster [--in-flight 16] [--rounds 3] [--json FILE]

Starts Ray, Serve, the pool and one replica on this machine, then measures in turn: the engine in
this process, unary calls, streams. The same prompts, batch size, draft length and torch threads
everywhere; ratios are taken within a round, and the median of the rounds is reported.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.prompts import benchmark_tokens
from benchmarks.report import machine, table, write_json
from cluster import app
from cluster.client import AsyncClient
from cluster.config import ClusterConfig, from_args
from cluster.local_engine import LocalEngine, Output
from cluster.target_text import TargetText
from protos import lockstep_pb2 as pb
from replicas.replica import Replica
from scheduler.messages import Request

Prompts = Sequence[Sequence[int]]
Tokens = list[list[int]]


def in_process(
    replica: Replica, config: ClusterConfig, prompts: Prompts, new_tokens: int, in_flight: int
) -> tuple[float, Tokens]:
    """Tokens/s of the engine alone with so many requests in flight, and the outputs."""
    engine = LocalEngine(replica, config.scheduler)
    requests = [Request(str(i), tuple(p), new_tokens) for i, p in enumerate(prompts)]
    start = perf_counter()
    outputs: list[Output] = []
    running = 0
    for request in requests:
        while running >= in_flight:
            engine.advance()
            running = sum(output.reason is None for output in outputs)
        outputs.append(engine.submit(request))
        running += 1
    engine.run()
    seconds = perf_counter() - start
    tokens = [output.tokens for output in outputs]
    return sum(map(len, tokens)) / seconds, tokens


async def through_grpc(
    client: AsyncClient, prompts: Prompts, new_tokens: int, in_flight: int, stream: bool
) -> tuple[float, Tokens]:
    """Tokens/s over gRPC with so many calls in flight, and the outputs."""
    places = asyncio.Semaphore(in_flight)

    async def one(prompt: Sequence[int]) -> list[int]:
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=prompt), max_new_tokens=new_tokens, ignore_eos=True
        )
        async with places:
            if not stream:
                return list((await client.generate(request)).token_ids)
            tokens: list[int] = []
            async for chunk in client.stream(request):
                tokens.extend(chunk.token_ids)
            return tokens

    start = perf_counter()
    outputs = list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
    seconds = perf_counter() - start
    return sum(map(len, outputs)) / seconds, outputs


async def measure(
    replica: Replica, config: ClusterConfig, prompts: Prompts, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens/s per way and round; raises AssertionError when outputs differ."""
    client = AsyncClient(f"localhost:{config.server.grpc_port}")
    await client.wait_until_ready(120)
    figures: dict[str, list[float]] = {"in process": [], "unary": [], "stream": []}
    size = (args.new_tokens, args.in_flight)
    try:
        for stream in (False, True):  # warm-up of every process on the way
            await through_grpc(client, prompts[: args.in_flight], *size, stream)
        in_process(replica, config, prompts[:8], *size)
        for number in range(args.rounds):
            speed, expected = in_process(replica, config, prompts, *size)
            figures["in process"].append(speed)
            for way in ("unary", "stream"):
                speed, outputs = await through_grpc(client, prompts, *size, way == "stream")
                assert outputs == expected, f"{way}: outputs differ from the engine's"
                figures[way].append(speed)
            print(f"round {number + 1}:", {k: round(v[-1]) for k, v in figures.items()}, flush=True)
    finally:
        await client.close()
    return figures


def main() -> None:
    """Parse the command line, start a cluster, measure, print, stop the cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=Path, help="JSON lines with `prompt` or `turns`")
    parser.add_argument("--limit", type=int, default=64, help="number of prompts")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch's threads, everywhere")
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--grpc-port", type=int, default=9210)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    config = from_args(
        {
            "target": args.target,
            "draft": args.draft,
            "torch_threads": args.threads,
            "grpc_port": args.grpc_port,
            "http_port": args.grpc_port + 1,
        }
    )
    replica = Replica.load(config.replica)
    text = TargetText.load(config.replica)
    prompts = benchmark_tokens(
        text.encoder, args.limit, args.prompts, replica.spec.context_len - args.new_tokens
    )
    print(machine() | {"threads": args.threads})
    cluster = app.ClusterRun(config)
    try:
        cluster.start(quiet=True)
        figures = asyncio.run(measure(replica, config, prompts, args))
    finally:
        cluster.stop()
    ratios = {
        way: median(a / b for a, b in zip(figures[way], figures["in process"], strict=True))
        for way in ("unary", "stream")
    }
    rows = [(way, median(speeds), ratios.get(way, 1.0)) for way, speeds in figures.items()]
    print(table(("way", "tokens/s", "over the engine in one process"), rows))
    write_json(
        args.json,
        {
            "in_flight": args.in_flight,
            "threads": args.threads,
            "prompts": len(prompts),
            "new_tokens": args.new_tokens,
            "tokens_per_s": figures,
            "ratios": ratios,
        },
    )


if __name__ == "__main__":
    main()
