"""A closed loop of clients: tokens/s, latencies, and what each process had of the CPU.

The processes' CPU time comes from the kernel, so this must run on the cluster's own machine and in
a process that is connected to its Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import aiohttp
import ray

from benchmarks.shared.processes import cluster_processes
from benchmarks.shared.report import percentiles
from cluster.bench.arrivals import Closed, Extent, drive
from cluster.bench.figures import Record, first_token_times, latencies
from cluster.bench.load import grpc_request
from cluster.bench.workload import Workload
from cluster.client import NO_RETRY, AsyncClient
from cluster.config import ClusterConfig
from cluster.pool.protocol import NAMESPACE

Tokens = list[list[int]]

WAYS = ("unary", "stream", "sse")
"""Over gRPC, the same as a stream, and as a stream of OpenAI's API."""

_salts = itertools.count()


@dataclass(frozen=True)
class Load:
    """So many clients, each with its next request as soon as it has its answer."""

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    in_flight: int

    def workload(self) -> Workload:
        """Its requests, greedy, with a cache salt that no run had: the prompts are those of earlier
        runs, and a prefix that is found costs nothing."""
        prompts = tuple(map(tuple, self.prompts))
        options = {"max_new_tokens": self.new_tokens, "ignore_eos": True}
        return Workload(prompts, options, salt=f"run {next(_salts)}")


@dataclass(frozen=True)
class Base:
    """What a load gives without the cluster."""

    tokens_per_s: float
    latencies_s: tuple[float, ...]
    """From a request's sending to its last token."""
    tokens: Tokens
    """New tokens by request."""

    def figures(self) -> dict[str, Any]:
        """What is written of it."""
        latency_s = percentiles(self.latencies_s, (50, 99))
        return {"tokens_per_s": round(self.tokens_per_s, 1), "latency_s": latency_s}


@dataclass(frozen=True)
class Served(Base):
    """One run of a load through the cluster."""

    cpu_s: Mapping[str, float]
    """CPU time by kind of process; `client` is this one. Empty where it was not asked for."""
    batches: int
    """Batches that the pool gave meanwhile."""
    first_s: Sequence[float]
    """From a request's sending to its first token."""
    chunks: int
    """Of all streams together; 0 of unary calls."""

    def figures(self) -> dict[str, Any]:
        requests = len(self.tokens)
        found = super().figures()
        if self.chunks:
            found["first_token_s"] = percentiles(self.first_s, (50, 99))
            found["chunks_per_request"] = round(self.chunks / requests, 1)
        if self.batches:
            found["batches"] = self.batches
            found["cpu_ms_per_request"] = {
                kind: round(1000 * seconds / requests, 3) for kind, seconds in self.cpu_s.items()
            }
            found["pool_cpu_us_per_batch"] = round(1e6 * self.cpu_s["pool"] / self.batches)
        return found


@dataclass(frozen=True)
class Clients:
    """Ways to ask for the same tokens; each iteration is what one message brought."""

    grpc: AsyncClient
    http: aiohttp.ClientSession
    model: str

    def headers(self, number: int) -> dict[str, str]:
        """Of the HTTP request of this number, beside those of every request."""
        return {}

    async def unary(self, workload: Workload, number: int) -> AsyncIterator[list[int]]:
        yield list((await self.grpc.generate(grpc_request(workload, number))).token_ids)

    async def stream(self, workload: Workload, number: int) -> AsyncIterator[list[int]]:
        async for chunk in self.grpc.stream(grpc_request(workload, number)):
            yield list(chunk.token_ids)

    async def sse(self, workload: Workload, number: int) -> AsyncIterator[list[int]]:
        options = workload.options_of(number)
        fields = {
            "model": self.model,
            "prompt": workload.prompt(number),
            "max_tokens": options.pop("max_new_tokens"),
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            **options,
        }
        headers = self.headers(number)
        async with self.http.post("/v1/completions", json=fields, headers=headers) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])["choices"][0]["token_ids"]


async def compare(
    clients: Clients,
    load: Load,
    base: Callable[[Load], Awaitable[Base]],
    rounds: int,
    count_batches: Callable[[], int],
) -> dict[str, Any]:
    """The load in all ways, in turn, over its base of the same round; what is written of it.

    Raises AssertionError for a wrong token.
    """
    bases: list[Base] = []
    runs: dict[str, list[Served]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        bases.append(await base(load))
        for way in WAYS:
            served = await run(clients, load, way, count_batches)
            assert served.tokens == bases[-1].tokens, f"{way}: a wrong token"
            runs[way].append(served)
    entry: dict[str, Any] = {
        "in_flight": load.in_flight,
        "requests": len(load.prompts),
        "base": [baseline.figures() for baseline in bases],
    }
    for way in WAYS:
        pairs = zip(runs[way], bases, strict=True)
        ratio = median(served.tokens_per_s / baseline.tokens_per_s for served, baseline in pairs)
        entry[way] = {
            "ratio": round(ratio, 3),
            "rounds": [served.figures() for served in runs[way]],
        }
    return entry


def batch_counter(config: ClusterConfig) -> Callable[[], int]:
    """Asks the pool's actors how many batches they have given."""
    actors = [ray.get_actor(name, namespace=NAMESPACE) for name in config.pool_names]

    def count() -> int:
        views = ray.get([actor.status.remote() for actor in actors])
        return sum(view.status.figures.batches for view in views)

    return count


@asynccontextmanager
async def clients_of(config: ClusterConfig) -> AsyncIterator[Clients]:
    """One client of each edge, when all replicas serve."""
    async with (
        AsyncClient(f"localhost:{config.server.grpc_port}", retry=NO_RETRY) as client,
        aiohttp.ClientSession(
            f"http://localhost:{config.server.http_port}",
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=600),
        ) as http,
    ):
        await client.wait_until_ready(120)
        while len((await client.status()).replicas) < config.replicas:
            await asyncio.sleep(0.1)
        yield Clients(client, http, config.model_name)


async def run(
    clients: Clients, load: Load, way: str, count_batches: Callable[[], int] | None = None
) -> Served:
    """The load once, in one of WAYS; with the processes' CPU time if batches are counted."""
    ask = {"unary": clients.unary, "stream": clients.stream, "sse": clients.sse}[way]
    chunks = 0
    workload = load.workload()
    outputs: Tokens = [[] for _ in load.prompts]

    async def send(number: int, record: Record, now_s: Callable[[], float]) -> None:
        nonlocal chunks
        async for new in ask(workload, number):
            chunks += 1
            if new:
                record.chunks.append((now_s(), len(new)))
                outputs[number].extend(new)

    processes: dict[int, str] = {}
    if count_batches:
        processes = {each.pid: each.kind for each in cluster_processes()}
        processes[os.getpid()] = "client"
    batches = count_batches() if count_batches else 0
    before = _cpu_s(processes)
    start = perf_counter()
    records = await drive(send, Closed(load.in_flight), Extent(requests=len(outputs)))
    seconds = perf_counter() - start
    after = _cpu_s(processes)
    return Served(
        sum(map(len, outputs)) / seconds,
        tuple(latencies(records)),
        outputs,
        {kind: after[kind] - before[kind] for kind in after},
        count_batches() - batches if count_batches else 0,
        first_token_times(records),
        chunks if way != "unary" else 0,
    )


def _cpu_s(processes: Mapping[int, str]) -> dict[str, float]:
    spent: defaultdict[str, float] = defaultdict(float)
    for pid, kind in processes.items():
        spent[kind] += process_cpu_s(pid)
    return dict(spent)


def process_cpu_s(pid: int) -> float:
    """User and system time of all threads [s]; the kernel counts in ticks of 10 ms."""
    # The name, which may hold anything, ends with the last bracket.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
