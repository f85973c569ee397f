"""A closed loop of clients over gRPC: tokens/s, latencies, and what each process had of the CPU.

The processes' CPU time comes from the kernel, so this must run on the cluster's own machine and in
a process that is connected to its Ray.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

from benchmarks.processes import cluster_processes
from cluster.client import AsyncClient
from protos import lockstep_pb2 as pb

Prompts = Sequence[Sequence[int]]
Tokens = list[list[int]]

WAYS = ("unary", "stream")


@dataclass(frozen=True)
class Load:
    """So many clients, each with its next request as soon as it has its answer."""

    prompts: Prompts
    new_tokens: int
    in_flight: int


@dataclass(frozen=True)
class Served:
    """One run of a load."""

    tokens_per_s: float
    latencies_s: tuple[float, ...]
    """From a request's sending to its last token, by request."""
    tokens: Tokens
    """New tokens by request."""
    cpu_s: Mapping[str, float]
    """CPU time by kind of process; `client` is this one. Empty where it was not asked for."""
    orders: int = 0
    """Orders that the pool gave meanwhile."""

    def figures(self) -> dict[str, Any]:
        """What is written of it."""
        requests = len(self.tokens)
        found: dict[str, Any] = {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "latency_s": percentiles(self.latencies_s),
        }
        if self.orders:
            found["orders"] = self.orders
            found["cpu_ms_per_request"] = {
                kind: round(1000 * seconds / requests, 3) for kind, seconds in self.cpu_s.items()
            }
            found["pool_cpu_us_per_order"] = round(1e6 * self.cpu_s["pool"] / self.orders)
        return found


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile; needs two values at least."""
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 4), "p99": round(cuts[98], 4)}


async def through_grpc(
    client: AsyncClient, load: Load, stream: bool, count_orders: Callable[[], int] | None = None
) -> Served:
    """The load once, over one client; with the processes' CPU time if orders are counted."""
    places = asyncio.Semaphore(load.in_flight)
    latencies: dict[int, float] = {}

    async def one(number: int, prompt: Sequence[int]) -> list[int]:
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=prompt),
            max_new_tokens=load.new_tokens,
            ignore_eos=True,
        )
        async with places:
            start = perf_counter()
            tokens: list[int] = []
            if stream:
                async for chunk in client.stream(request):
                    tokens.extend(chunk.token_ids)
            else:
                tokens.extend((await client.generate(request)).token_ids)
            latencies[number] = perf_counter() - start
            return tokens

    processes = _processes() if count_orders else {}
    orders = count_orders() if count_orders else 0
    before = _cpu_s(processes)
    start = perf_counter()
    outputs = list(await asyncio.gather(*(one(*each) for each in enumerate(load.prompts))))
    seconds = perf_counter() - start
    after = _cpu_s(processes)
    return Served(
        sum(map(len, outputs)) / seconds,
        tuple(latencies[number] for number in range(len(load.prompts))),
        outputs,
        {kind: after[kind] - before[kind] for kind in after},
        count_orders() - orders if count_orders else 0,
    )


def _processes() -> dict[int, str]:
    """Kind by process id."""
    return {each.pid: each.kind for each in cluster_processes()} | {os.getpid(): "client"}


def _cpu_s(processes: Mapping[int, str]) -> dict[str, float]:
    """User and system time of all threads, by kind [s]; the kernel counts in ticks of 10 ms."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    spent: defaultdict[str, float] = defaultdict(float)
    for pid, kind in processes.items():
        # The name, which may hold anything, ends with the last bracket.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent[kind] += (int(fields[11]) + int(fields[12])) * tick_s
    return dict(spent)
