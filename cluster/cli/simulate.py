"""`lockstep simulate`: experiments of `scheduler.simulation` side by side, as a table and JSON."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import typer

from cluster.bench.figures import Distribution
from cluster.cli.flags import lengths, output, with_settings, write
from cluster.local.engine import NO_QUEUE_LIMITS
from scheduler.messages import ReplicaSpec
from scheduler.simulation import (
    DEVICES,
    MEASURED_POOL_S,
    PAIRS,
    Experiment,
    Figures,
    Roofline,
    Setup,
    drawn,
    parse_lengths,
    poisson,
)

_BLOCK_SIZE = 16


def _one_of(names: Collection[str]) -> Any:
    listed = ", ".join(names)

    def known(name: str) -> str:
        if name not in names:
            raise typer.BadParameter(f"expected one of {listed}, got {name!r}")
        return name

    return typer.Option(help=f"One of {listed}.", parser=known, metavar="NAME")


@with_settings("scheduler")
def simulate(
    context: typer.Context,
    settings: Any,
    replicas: Annotated[
        list[int],
        typer.Option(min=1, help="Number of replicas; repeat the option for several cases."),
    ] = [8],  # noqa: B006  (typer copies it)
    shards: Annotated[
        list[int],
        typer.Option(
            min=1, help="Number of pools; repeat it to combine each with each number of replicas."
        ),
    ] = [1],  # noqa: B006
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 2000,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Open loop: requests per second, Poisson arrivals."),
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="Closed loop with this many requests at a time.")
    ] = None,
    per_replica: Annotated[
        bool,
        typer.Option(
            "--per-replica",
            help="Multiply --requests, --rate and --in-flight by the number of replicas.",
        ),
    ] = False,
    prompt_tokens: Annotated[
        str, lengths("N, N..M or lognormal:MEDIAN:SIGMA.")
    ] = "lognormal:200:0.8",
    new_tokens: Annotated[str, lengths("Likewise.")] = "lognormal:200:0.6",
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Acceptance rate of draft tokens.")
    ] = 0.7,
    device: Annotated[str, _one_of(DEVICES)] = "h100",
    pair: Annotated[str, _one_of(PAIRS)] = "qwen3-8b/0.6b",
    pool_cost: Annotated[
        Literal["none", "measured"], typer.Option(help="Time that a batch occupies its pool.")
    ] = "measured",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same figures.")] = 0,
    json: Annotated[Path | None, output("Write the figures here.")] = None,
) -> None:
    """Run the real scheduler with simulated replicas in virtual time. See docs/simulate.md."""
    if (rate is None) == (in_flight is None):
        raise typer.BadParameter("give either --rate or --in-flight")
    if max(shards) > min(replicas):
        raise typer.BadParameter(
            "every shard needs a replica: give at least as many --replicas as --shards"
        )
    tokens = parse_lengths(prompt_tokens), parse_lengths(new_tokens)
    hardware = Roofline(DEVICES[device], *PAIRS[pair])
    spec = ReplicaSpec(
        kv_blocks=hardware.kv_blocks(_BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        context_len=32768,
        vocab_size=2,
    )
    # A queue is to be seen, so no request is refused for load.
    config = settings.scheduler
    config = config.model_copy(update=NO_QUEUE_LIMITS | config.model_dump(exclude_unset=True))
    pool_batch_s = MEASURED_POOL_S if pool_cost == "measured" else 0.0
    base = Setup(1, spec, hardware.times, config, pool_batch_s=pool_batch_s)
    cases = []
    for count, pools in product(replicas, shards):
        times = count if per_replica else 1
        at_once = None if in_flight is None else in_flight * times
        setup = replace(base, replicas=count, shards=pools, in_flight=at_once)
        if sys.stderr.isatty():
            typer.echo(f"{count} replicas, {pools} pools ...", err=True)
        rng = Random(seed)
        arrivals = None if rate is None else poisson(rate * times, rng)
        coming = drawn(arrivals, requests * times, *tokens, acceptance, rng)
        figures = Experiment(setup, coming, Random(f"{seed}/study")).run()
        over_time = [_rounded(asdict(sample)) for sample in figures.samples]
        cases.append({**_summary(setup, figures), "over_time": over_time})
    described = {
        "options": {name: each for name, each in context.params.items() if each is not None},
        "scheduler": config.model_dump(),
        "kv_blocks": spec.kv_blocks,
        "pool_batch_s": pool_batch_s,
    }
    _print(cases)
    write(json, lambda: _as_json({"simulated": described, "cases": cases}))
    if not all(case["finished"] for case in cases):
        typer.echo("no request finished", err=True)
        raise typer.Exit(1)


def _summary(setup: Setup, figures: Figures) -> dict[str, Any]:
    """The figures as JSON has them; times in virtual seconds."""
    times = {
        "latency_s": figures.latency_s,
        "ttft_s": figures.first_token_s,
        "token_s": figures.per_token_s,
    }
    sums = figures.sums
    spread = {name: Distribution.of(values) for name, values in times.items()}
    summary = {
        "replicas": setup.replicas,
        "shards": setup.shards,
        "in_flight": setup.in_flight,
        "requests": figures.finished + len(figures.refusals),
        "finished": figures.finished,
        "refused": len(figures.refusals),
        "refusal": next(iter(figures.refusals), None),
        "new_tokens": figures.tokens,
        "elapsed_s": figures.elapsed_s,
        "tokens_per_s": figures.tokens_per_s(),
        "utilisation": figures.utilisation(setup.replicas),
        "pool_utilisation": figures.pool_utilisation(setup.shards),
        **{name: asdict(each) if each else None for name, each in spread.items()},
        "rows_mean": sums.row_steps / max(sums.steps, 1),
        "spread_mean": sums.spread_mean,
        "tokens_per_row_and_step": figures.tokens / max(sums.row_steps, 1),
        "waiting_most": figures.waiting_most,
        "batches": sums.batches,
    }
    return _rounded(summary)  # type: ignore[no-any-return]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _as_json(report: dict[str, Any]) -> str:
    """A line for each case."""
    text = json_text.dumps(report, separators=(",", ":"), default=str)
    return text.replace('{"replicas"', '\n{"replicas"') + "\n"


def _print(cases: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table

    from cluster.local.console import console

    out = console()
    table = Table("replicas / pools", *(f"{case['replicas']} / {case['shards']}" for case in cases))
    shown = [_cells(case) for case in cases]
    for name in shown[0]:
        table.add_row(name, *(cells[name] for cells in shown))
    out.print(table)
    out.print("median / 99th percentile; rates over the middle half", style="dim")
    for reason in dict.fromkeys(case["refusal"] for case in cases if case["refused"]):
        out.print(f"refused, the first: {reason}")


def _cells(case: dict[str, Any]) -> dict[str, str]:
    return {
        "tokens/s": f"{case['tokens_per_s']:,.0f}",
        "replicas at work": f"{case['utilisation']:.0%}",
        "pools at work": f"{case['pool_utilisation']:.0%}",
        "to the first token": _times(case["ttft_s"], 1000, "ms"),
        "per token": _times(case["token_s"], 1000, "ms"),
        "latency": _times(case["latency_s"], 1, "s"),
        "rows per step": f"{case['rows_mean']:.1f}",
        "spread": f"{case['spread_mean']:.0f}",
        "most that waited": str(case["waiting_most"]),
        "requests, of them refused": f"{case['requests']}, {case['refused']}",
    }


def _times(of: dict[str, float] | None, scale: float, unit: str) -> str:
    if of is None:
        return "-"
    return f"{of['p50'] * scale:.3g} / {of['p99'] * scale:.3g} {unit}"
