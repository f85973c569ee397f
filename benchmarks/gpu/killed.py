"""Two replicas under load, one of them killed: every answer must be that of an undisturbed run.

python -m benchmarks.gpu.killed --target TARGET --device DEVICE
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence

from benchmarks.cluster.__main__ import shared_device
from benchmarks.shared.processes import cluster_processes
from cluster.client import NO_RETRY, AsyncClient
from cluster.config import ClusterConfig
from cluster.config_sources import from_args
from cluster.run import ClusterRun
from protos import lockstep_pb2 as pb

STREAMS, TOKENS = 16, 96


async def answers(config: ClusterConfig, kill: bool) -> tuple[list[list[int]], float]:
    """Of each stream its tokens; the longest silence of any. Kills a replica when all run."""
    begun = asyncio.Barrier(STREAMS + 1)
    silence_s = 0.0

    async def one(client: AsyncClient, number: int) -> list[int]:
        nonlocal silence_s
        tokens: list[int] = []
        message = pb.GenerateRequest(prompt=f"Story {number}: ", max_new_tokens=TOKENS)
        message.ignore_eos = True
        last_s = 0.0
        async for chunk in client.stream(message, timeout_s=100.0):
            now_s = time.monotonic()
            if not last_s:
                await begun.wait()
            silence_s = max(silence_s, now_s - (last_s or now_s))
            last_s = now_s
            tokens += chunk.token_ids
        return tokens

    async with AsyncClient(f"localhost:{config.server.grpc_port}", retry=NO_RETRY) as client:
        asked = [asyncio.create_task(one(client, number)) for number in range(STREAMS)]
        await begun.wait()
        if kill:
            victim = next(one for one in cluster_processes() if one.kind == "replica")
            os.kill(victim.pid, signal.SIGKILL)
        return await asyncio.gather(*asked), silence_s


def main(argv: Sequence[str] | None = None) -> int:
    """Starts a cluster, asks twice, compares. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("target", "tiny"), ("device", "cpu"), ("dtype", "float32")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--memory")
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args(argv)
    config = from_args(
        {
            "replicas": 2,
            "replica": {"target": args.target, "torch_threads": 1, **shared_device(args)},
            **({"actors": {"replica_gpus": 0.5}} if args.device.startswith("cuda") else {}),
            "server": {"grpc_port": 9250, "http_port": 9251},
        }
    )
    cluster = ClusterRun(config)
    try:
        cluster.start(quiet=True)
        right, _ = asyncio.run(answers(config, kill=False))
        found, silence_s = asyncio.run(answers(config, kill=True))
    finally:
        cluster.stop(at_once=True)
    wrong = sum(a != b for a, b in zip(right, found, strict=True))
    print(f"{STREAMS} streams, a replica killed: {wrong} wrong, silence {silence_s:.1f} s")
    return int(wrong > 0 or any(len(tokens) != TOKENS for tokens in found))


if __name__ == "__main__":
    sys.exit(main())
