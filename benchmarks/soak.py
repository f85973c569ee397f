"""Whether anything grows: memory of every process under a long mixed load, and what is left over.

    python -m benchmarks.soak [--minutes 30] [--cancels 1000] [--json FILE]

Starts Ray, Serve, the pool and replicas on this machine. Unary calls and streams, greedy and
sampled, some with deadlines and some cancelled, run all the time; the resident memory of each
process is sampled, and its slope after a warm-up is fitted by least squares. With `--cancels` so
many requests are then started and cancelled at random moments. In the end no sequence and no KV
block may be left over; the exit status is 1 if one is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import linear_regression, pvariance
from typing import Any

import grpc

from benchmarks.processes import Process, cluster_processes, resident_mib
from benchmarks.prompts import benchmark_tokens
from benchmarks.report import machine, table, write_json
from cluster import app
from cluster.client import AsyncClient
from cluster.config import from_args
from cluster.frontend.target_text import TargetText
from protos import lockstep_pb2 as pb

Prompts = Sequence[Sequence[int]]

NEW_TOKENS = (16, 64, 128)
_LEFT_WAIT_S = 20.0


# --------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Fit:
    """A line through the memory of one process."""

    samples: int
    first_mib: float
    last_mib: float
    peak_mib: float
    mib_per_hour: float
    error_mib_per_hour: float
    """Standard error of the slope; memory grows in jumps, so it flatters."""


def fit(samples: Sequence[tuple[float, float]]) -> Fit:
    """Least squares over at least two (seconds, MiB)."""
    count = len(samples)
    times, values = zip(*samples, strict=True)
    slope, first = linear_regression(times, values)
    rest = sum((mib - first - slope * at_s) ** 2 for at_s, mib in samples)
    error = (rest / (count - 2) / count / pvariance(times)) ** 0.5 if count > 2 else 0.0
    return Fit(count, values[0], values[-1], max(values), slope * 3600, error * 3600)


@dataclass
class Memory:
    """Samples of every process of the cluster, taken on a thread."""

    every_s: float
    samples: dict[Process, list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """Samples while the body runs. The caller is connected to the cluster's Ray."""
        over = threading.Event()
        thread = threading.Thread(target=self._sample, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(self.every_s + 10)

    def _sample(self, over: threading.Event) -> None:
        start_s = time.monotonic()
        while not over.wait(self.every_s):
            at_s = time.monotonic() - start_s
            for process in cluster_processes():
                if (mib := resident_mib(process.pid)) is not None:
                    self.samples[process].append((at_s, mib))

    def fits(self, after_s: float) -> dict[Process, Fit]:
        """Of the processes with at least two samples after the warm-up."""
        late = {
            process: [sample for sample in samples if sample[0] >= after_s]
            for process, samples in self.samples.items()
        }
        return {process: fit(samples) for process, samples in late.items() if len(samples) > 1}


# --------------------------------------------------------------------------- load


def draw_request(rng: Random, prompts: Prompts) -> pb.GenerateRequest:
    """A request of the mixed load."""
    request = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=rng.choice(prompts)),
        max_new_tokens=rng.choice(NEW_TOKENS),
        ignore_eos=True,
    )
    if rng.random() < 0.5:
        request.temperature, request.top_p, request.seed = 1.0, 0.95, rng.randrange(2**40)
    if rng.random() < 0.05:
        request.timeout_s = rng.uniform(0.1, 2.0)
    return request


async def ask(
    client: AsyncClient, request: pb.GenerateRequest, stream: bool, cancel_after_s: float | None
) -> tuple[str, int]:
    """(how it ended, tokens received). Ends other than ours are the status code's name."""
    tokens = 0
    try:
        async with asyncio.timeout(cancel_after_s):
            if stream:
                async for chunk in client.stream(request):
                    tokens += len(chunk.token_ids)
            else:
                tokens = len((await client.generate(request)).token_ids)
    except TimeoutError:
        return "cancelled", tokens
    except grpc.RpcError as error:
        return error.code().name, tokens
    return "OK", tokens


async def mixed_load(
    client: AsyncClient, prompts: Prompts, rng: Random, seconds: float, in_flight: int
) -> tuple[Counter[str], int]:
    """(requests by how they ended, tokens received) of a load that never pauses."""
    start_s = time.monotonic()
    ends: Counter[str] = Counter()
    received = 0

    async def one_after_the_other() -> None:
        nonlocal received
        while time.monotonic() - start_s < seconds:
            cancel_after_s = rng.uniform(0.02, 1.0) if rng.random() < 0.15 else None
            request = draw_request(rng, prompts)
            end, tokens = await ask(client, request, rng.random() < 0.5, cancel_after_s)
            ends[end] += 1
            received += tokens

    async def tell() -> None:
        while True:
            await asyncio.sleep(60)
            passed_s = time.monotonic() - start_s
            count = sum(ends.values())
            print(f"{passed_s / 60:.0f} min: {count} requests, {received} tokens", flush=True)

    telling = asyncio.create_task(tell())
    try:
        await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
    finally:
        telling.cancel()
    return ends, received


async def cancel_many(
    client: AsyncClient, prompts: Prompts, rng: Random, count: int, in_flight: int
) -> Counter[str]:
    """Starts so many requests and cancels each at a random moment; how they ended."""
    ends: Counter[str] = Counter()
    places = asyncio.Semaphore(in_flight)

    async def one(number: int) -> None:
        async with places:
            request = draw_request(rng, prompts)
            # Long enough that hardly any ends by itself.
            request.max_new_tokens = NEW_TOKENS[-1]
            request.ClearField("timeout_s")
            end, _ = await ask(client, request, number % 2 == 0, rng.uniform(0.0, 0.3))
            ends[end] += 1

    await asyncio.gather(*(one(number) for number in range(count)))
    return ends


async def left_over(client: AsyncClient, wait_s: float = _LEFT_WAIT_S) -> dict[str, int]:
    """Sequences and KV blocks that are still there after at most `wait_s`; all 0 if none are."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            status = await client.status()
        except grpc.RpcError:
            # On a busy machine the pool may be late with an answer.
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.1)
            continue
        left = {
            "waiting": status.waiting,
            "running": status.running,
            "residents": sum(replica.residents for replica in status.replicas),
            "kv_blocks": sum(one.kv_blocks - one.kv_blocks_free for one in status.replicas),
        }
        if not any(left.values()) or time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(0.1)


# --------------------------------------------------------------------------- the run


async def soak(
    address: str, prompts: Prompts, args: argparse.Namespace, memory: Memory
) -> dict[str, Any]:
    """Everything but memory."""
    rng = Random(args.seed)
    async with AsyncClient(address) as client:
        await client.wait_until_ready(120)
        with memory.sampled():
            ends, tokens = await mixed_load(client, prompts, rng, args.minutes * 60, args.in_flight)
        figures: dict[str, Any] = {
            "requests": dict(ends),
            "tokens": tokens,
            "left_over": await left_over(client),
        }
        if args.cancels:
            cancels = await cancel_many(client, prompts, rng, args.cancels, args.in_flight)
            figures["cancels"] = dict(cancels)
            figures["left_over_after_cancels"] = await left_over(client)
        return figures


def main() -> int:
    """Parse the command line, start a cluster, load it, print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up-minutes", type=float, help="default: a fifth of the minutes")
    parser.add_argument("--cancels", type=int, default=0)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--sample-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--draft", default="tiny")
    parser.add_argument("--grpc-port", type=int, default=9220)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    ports = {"grpc_port": args.grpc_port, "http_port": args.grpc_port + 1}
    config = from_args(
        {"target": args.target, "draft": args.draft, "replicas": args.replicas, "torch_threads": 1}
        | ports
    )
    text = TargetText.load(config.replica)
    prompts = benchmark_tokens(text.encoder, 64, None, text.context_len - NEW_TOKENS[-1])
    memory = Memory(args.sample_s)
    cluster = app.ClusterRun(config)
    try:
        cluster.start(quiet=True)
        address = f"localhost:{config.server.grpc_port}"
        figures = asyncio.run(soak(address, prompts, args, memory))
    finally:
        cluster.stop()
    warm_up = args.minutes / 5 if args.warm_up_minutes is None else args.warm_up_minutes
    fits = memory.fits(warm_up * 60)
    return _report(args, figures, fits)


def _report(args: argparse.Namespace, figures: dict[str, Any], fits: dict[Process, Fit]) -> int:
    header = ("process", "pid", "first MiB", "last MiB", "peak MiB", "MiB/hour", "+-")
    rows = [
        (
            *(process.kind, process.pid, one.first_mib, one.last_mib, one.peak_mib),
            *(one.mib_per_hour, one.error_mib_per_hour),
        )
        for process, one in fits.items()
    ]
    print(machine())
    print(table(header, rows))
    for name, value in figures.items():
        print(f"{name}: {value}")
    processes = [
        {"kind": process.kind, "pid": process.pid, **vars(one)} for process, one in fits.items()
    ]
    settings = {"minutes": args.minutes, "in_flight": args.in_flight, "replicas": args.replicas}
    write_json(args.json, {**settings, **figures, "processes": processes})
    left = [figures["left_over"], figures.get("left_over_after_cancels", {})]
    return 1 if any(any(one.values()) for one in left) else 0


if __name__ == "__main__":
    sys.exit(main())
