"""What looking on costs: tokens/s with metrics, page, traces or the audit over the same without.

    python -m benchmarks.observed [--parts watched audit] [--rounds 6] [--json FILE]

Rounds with and without go in turns (off, on, on, off), and a ratio is that of two neighbours.

*watched*: one cluster under a closed loop of streams of OpenAI's API. Meanwhile `/metrics` is read
every 5 s, the dashboard's data every second as its page does, and a call in a hundred is traced, to
a collector here. *audit*: two clusters begun one after the other in turns, under an open loop at
80 % of what the first round could serve, without and with an audit of 1 %.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from statistics import median
from typing import Any

from aiohttp import web

from benchmarks.cluster.closed_loop import Clients, Load, Served, clients_of, run
from benchmarks.shared.command_line import parser_of
from benchmarks.shared.prompts import benchmark_tokens
from benchmarks.shared.report import machine, percentiles, table, write_json
from cluster.bench.arrivals import Arrivals, Closed, Extent, Poisson, drive
from cluster.bench.figures import Record, latencies
from cluster.config import ClusterConfig
from cluster.config_sources import from_args
from cluster.frontend.target_text import TargetText
from cluster.run import ClusterRun

SCRAPE_S = 5.0
PAGE_S = 1.0
TRACED = 100
"""One call in so many."""
LOAD_OF_AUDIT = 0.8


class Traced(Clients):
    """Clients one in a hundred of whose calls says that it is to be traced."""

    def headers(self, number: int) -> dict[str, str]:
        if number % TRACED:
            return {}
        return {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"}


@contextlib.asynccontextmanager
async def collector(port: int) -> AsyncIterator[Callable[[], int]]:
    """Takes traces by OTLP; how many messages have come."""
    came = 0

    async def take(request: web.Request) -> web.Response:
        nonlocal came
        await request.read()
        came += 1
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield lambda: came
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def watched(clients: Clients) -> AsyncIterator[None]:
    """Prometheus and an open page."""

    async def read(path: str, every_s: float) -> None:
        while True:
            async with clients.http.get(path) as answer:
                answer.raise_for_status()
                await answer.read()
            await asyncio.sleep(every_s)

    tasks = [
        asyncio.create_task(read("/metrics", SCRAPE_S)),
        asyncio.create_task(read("/dashboard/data", PAGE_S)),
    ]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()


async def measure_watched(config: ClusterConfig, load: Load, rounds: int, port: int) -> Any:
    """Of a running cluster whose traces go to this port."""
    runs: dict[bool, list[Served]] = {False: [], True: []}
    async with collector(port) as came, clients_of(config) as plain:
        seen = Traced(plain.grpc, plain.http, plain.model)
        await run(plain, load, "sse")
        for on in itertools.islice(itertools.cycle((False, True, True, False)), 2 * rounds):
            async with watched(plain) if on else contextlib.nullcontext():
                runs[on].append(await run(seen if on else plain, load, "sse"))
            print(f"{'on ' if on else 'off'} {runs[on][-1].tokens_per_s:.0f} tokens/s", flush=True)
        traces = came()
    assert traces, "no trace came"
    ratios = [
        on.tokens_per_s / off.tokens_per_s for off, on in zip(runs[False], runs[True], strict=True)
    ]
    return {
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "off": [each.figures() for each in runs[False]],
        "on": [each.figures() for each in runs[True]],
        "messages_of_traces": traces,
    }


async def served(
    config: ClusterConfig, load: Load, arrivals: Arrivals
) -> tuple[float, float, list[float]]:
    """Tokens/s, requests/s and latencies [s] of streams that arrive so."""
    async with clients_of(config) as clients:
        await run(clients, load, "sse")  # warms up
        workload, tokens = load.workload(), 0

        async def send(number: int, record: Record, now_s: Callable[[], float]) -> None:
            nonlocal tokens
            async for new in clients.sse(workload, number % len(load.prompts)):
                if new:
                    record.chunks.append((now_s(), len(new)))
                    tokens += len(new)

        records = await drive(send, arrivals, Extent(requests=2 * len(load.prompts)))
    spent_s = max(record.end_s or 0.0 for record in records)
    return tokens / spent_s, len(records) / spent_s, latencies(records)


def started(config: ClusterConfig, measure: Callable[[], Any]) -> Any:
    """What `measure` finds while the cluster runs."""
    cluster = ClusterRun(config)
    try:
        cluster.start(quiet=True)
        return measure()
    finally:
        cluster.stop()


def measure_audit(config: ClusterConfig, load: Load, rounds: int) -> Any:
    """Clusters one after the other."""
    audited = config.model_copy(update={"audit": config.audit.model_copy(update={"share": 0.01})})

    def of(which: ClusterConfig, arrivals: Arrivals) -> tuple[float, float, list[float]]:
        found: tuple[float, float, list[float]] = started(
            which, lambda: asyncio.run(served(which, load, arrivals))
        )
        return found

    _, most, _ = of(config, Closed(load.in_flight))
    arrivals = Poisson(LOAD_OF_AUDIT * most)
    runs: dict[bool, list[tuple[float, float, list[float]]]] = {False: [], True: []}
    for on in itertools.islice(itertools.cycle((False, True, True, False)), 2 * rounds):
        runs[on].append(of(audited if on else config, arrivals))
        print(f"audit {'on ' if on else 'off'} {runs[on][-1][0]:.0f} tokens/s", flush=True)
    ratios = [on[0] / off[0] for off, on in zip(runs[False], runs[True], strict=True)]
    return {
        "requests_per_s": round(arrivals.rate_per_s, 2),
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        **{
            name: percentiles([each for run in runs[on] for each in run[2]], (50, 99))
            for on, name in ((False, "off_latency_s"), (True, "on_latency_s"))
        },
    }


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = parser_of(__doc__)
    parts = ("watched", "audit")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--requests", type=int, default=256, help="of a round")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--grpc-port", type=int, default=9220)
    args = parser.parse_args()
    collector_port = args.grpc_port + 2
    config = from_args(
        {
            "replica.target": args.target,
            "replica.torch_threads": 1,
            "server.grpc_port": args.grpc_port,
            "server.http_port": args.grpc_port + 1,
        }
    )
    prompts = benchmark_tokens(TargetText.load(config.replica).encoder, 64, None, 512)
    load = Load(
        list(itertools.islice(itertools.cycle(prompts), args.requests)),
        args.new_tokens,
        args.in_flight,
    )
    print(machine())
    found: dict[str, Any] = {}
    if "watched" in args.parts:
        traced = config.model_copy(
            update={
                "trace": config.trace.model_copy(
                    update={"endpoint": f"http://localhost:{collector_port}/v1/traces", "share": 0}
                )
            }
        )
        measure = measure_watched(traced, load, args.rounds, collector_port)
        found["watched"] = started(traced, lambda: asyncio.run(measure))
    if "audit" in args.parts:
        found["audit"] = measure_audit(config, load, max(1, args.rounds // 2))
    rows = [(part, each["ratio"], min(each["ratios"])) for part, each in found.items()]
    print(table(("on over off", "tokens/s", "the least"), rows))
    write_json(args.json, found)


if __name__ == "__main__":
    main()
