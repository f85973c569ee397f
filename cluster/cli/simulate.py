"""`lockstep simulate`: its options and its table. The work is in `cluster.simulate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import typer

from cluster import simulate as runs
from cluster.cli.flags import output, with_settings, write
from scheduler.messages import ReplicaSpec
from scheduler.simulation import (
    DEVICES,
    MEASURED_POOL_S,
    PAIRS,
    Roofline,
    Setup,
    WorkloadRequest,
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


def _read(option: str, parse: Callable[[str], Any], text: str) -> Any:
    """What the option's text means; its ValueError names the option."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ValueError(f"expected N or N,M,..., got {text!r}")
    return counts


@with_settings("scheduler")
def simulate(
    context: typer.Context,
    settings: Any,
    replicas: Annotated[
        str, typer.Option(help="Number of replicas; several: one after the other.", metavar="N,M")
    ] = "8",
    shards: Annotated[
        str, typer.Option(help="Number of pools; several likewise.", metavar="N,M")
    ] = "1",
    requests: Annotated[int, typer.Option(min=1, help="How many requests come.")] = 2000,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Poisson arrivals, requests per second.")
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many at a time.")
    ] = None,
    per_replica: Annotated[
        bool,
        typer.Option("--per-replica", help="Requests, rate, in flight are for each."),
    ] = False,
    prompt_tokens: Annotated[
        str, typer.Option(help="N, N..M or lognormal:MEDIAN:SIGMA.", metavar="LENGTHS")
    ] = "lognormal:200:0.8",
    new_tokens: Annotated[
        str, typer.Option(help="Likewise.", metavar="LENGTHS")
    ] = "lognormal:200:0.6",
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="Of draft tokens.")] = 0.7,
    device: Annotated[str, _one_of(DEVICES)] = "h100",
    pair: Annotated[str, _one_of(PAIRS)] = "qwen3-8b/0.6b",
    pool_cost: Annotated[
        Literal["none", "measured"], typer.Option(help="What a batch costs in the pool.")
    ] = "measured",
    baseline: Annotated[
        Literal["eqspec"] | None, typer.Option(help="Beside each, rows in order of arrival.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same figures.")] = 0,
    json: Annotated[Path | None, output("Write the figures here.")] = None,
    svg: Annotated[Path | None, output("Write a picture here.")] = None,
) -> None:
    """The real scheduler over many replicas in virtual time; see docs/simulate.md."""
    if (rate is None) == (in_flight is None):
        raise typer.BadParameter("give either --rate or --in-flight")
    lengths = (
        _read("--prompt-tokens", parse_lengths, prompt_tokens),
        _read("--new-tokens", parse_lengths, new_tokens),
    )

    def requests_for(count: int) -> Sequence[WorkloadRequest]:
        """Those that come to so many replicas: the same in every case of as many."""
        rng, times = Random(seed), count if per_replica else 1
        arrivals = None if rate is None else poisson(rate * times, rng)
        return drawn(arrivals, requests * times, *lengths, acceptance, rng)

    hardware = Roofline(DEVICES[device], *PAIRS[pair])
    spec = ReplicaSpec(
        kv_blocks=hardware.kv_blocks(_BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        context_len=32768,
        vocab_size=2,
    )
    # A queue is to be seen, so no request is refused for load.
    unbounded = {"waiting_requests_max": 10**9, "waiting_tokens_max": 10**12}
    config = settings.scheduler
    config = config.model_copy(update=unbounded | config.model_dump(exclude_unset=True))
    base = Setup(
        replicas=1,
        spec=spec,
        times=hardware.times,
        config=config,
        pool_batch_s=MEASURED_POOL_S if pool_cost == "measured" else 0.0,
        in_flight=in_flight,
    )
    counts = _read("--replicas", _counts, replicas), _read("--shards", _counts, shards)
    all_cases = runs.cases(base, *counts, baseline is not None, per_replica)
    if any(case.setup.shards > case.setup.replicas for case in all_cases):
        raise typer.BadParameter("every shard needs a replica")
    results = []
    for case in all_cases:
        if sys.stderr.isatty():
            typer.echo(f"{case.named()} ...", err=True)
        results.append(runs.run(case, requests_for(case.setup.replicas), seed))
    described = {
        "options": {name: each for name, each in context.params.items() if each is not None},
        "scheduler": config.model_dump(),
        "kv_blocks": spec.kv_blocks,
        "pool_batch_s": base.pool_batch_s,
    }
    _print(results)
    write(json, lambda: runs.to_json(described, results))
    write(svg, lambda: runs.picture(results))
    empty = [result for result in results if not result.figures.finished]
    for result in empty:
        typer.echo(f"{result.case.named()}: no request finished", err=True)
    if empty:
        raise typer.Exit(1)


def _print(results: Sequence[runs.Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    summaries = [result.summary() for result in results]
    refused = any(one["refused"] for one in summaries)
    shown = [_cells(one, refused) for one in summaries]
    table = Table()
    table.add_column()
    for cells in shown:
        table.add_column(cells["case"], justify="right")
    for name in shown[0]:
        if name != "case":
            table.add_row(name, *(cells[name] for cells in shown))
    console = Console(highlight=False)
    console.print(table)
    legend = "replicas / pools / rows; median / 99th percentile; rates over the middle half"
    console.print(legend, style="dim")
    for reason in dict.fromkeys(one["refusal"] for one in summaries if one["refused"]):
        console.print(f"refused, the first: {reason}", markup=False)


def _cells(one: dict[str, Any], refused: bool) -> dict[str, str]:
    """`refused`: some case has requests that were."""
    cells = {
        "case": f"{one['replicas']} / {one['shards']} / {one['rows']}",
        "tokens/s": f"{one['tokens_per_s']:,.0f}",
        "replicas at work": f"{one['utilisation']:.0%}",
        "pools at work": f"{one['pool_utilisation']:.0%}",
        "to the first token": _times(one["ttft_s"], 1000, "ms"),
        "per token": _times(one["token_s"], 1000, "ms"),
        "latency": _times(one["latency_s"], 1, "s"),
        "rows per step": f"{one['rows_mean']:.1f}",
        "spread": f"{one['spread_mean']:.0f}",
        "most that waited": str(one["waiting_most"]),
        "requests": str(one["requests"]),
    }
    if refused:
        cells["of them refused"] = str(one["refused"])
    return cells


def _times(of: dict[str, float] | None, scale: float, unit: str) -> str:
    if of is None:
        return "-"
    return f"{of['p50'] * scale:.3g} / {of['p99'] * scale:.3g} {unit}"
