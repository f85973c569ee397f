"""`lockstep simulate`: its options and its table. The work is in `cluster.simulate`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.writable import check_writable

if TYPE_CHECKING:
    from cluster.simulate import Result
    from scheduler.config import SchedulerConfig
    from scheduler.simulation import (
        AcceptanceMix,
        FittedTimes,
        Lengths,
        PoolTimes,
        Roofline,
        WorkloadRequest,
    )

CHARACTERS_PER_TOKEN = 4
"""By which the lengths of prompts in a file are estimated."""

_SAID_BY_A_TRACE = ("requests", "per_replica", "prompt_tokens", "prompts", "new_tokens")
_OPTION_OF = {"rows_max": "--batch-size"}
"""Where a setting of the scheduler is called otherwise here."""


def simulate(
    context: typer.Context,
    replicas: Annotated[
        str, typer.Option(help="Number of replicas; several, as 64,256, one after the other.")
    ] = "8",
    shards: Annotated[str, typer.Option(help="Number of pools; several likewise.")] = "1",
    requests: Annotated[int, typer.Option(min=1, help="How many requests come.")] = 2000,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Poisson arrivals, requests per second.")
    ] = None,
    bursts: Annotated[
        str | None,
        typer.Option(help="With --rate: that for ON seconds, none for OFF.", metavar="ON,OFF"),
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many at a time.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with at_s, prompt_tokens, new_tokens.", exists=True, dir_okay=False
        ),
    ] = None,
    per_replica: Annotated[
        bool,
        typer.Option("--per-replica", help="Requests, rate, in flight are for each."),
    ] = False,
    prompt_tokens: Annotated[
        str, typer.Option(help="N, N..M or lognormal:MEDIAN:SIGMA.")
    ] = "lognormal:200:0.8",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Lengths of these prompts instead.", exists=True, dir_okay=False),
    ] = None,
    new_tokens: Annotated[str, typer.Option(help="Likewise.")] = "lognormal:200:0.6",
    acceptance: Annotated[
        str, typer.Option(help="Of draft tokens; or a mix of requests, as 0.9:3,0.4:1.")
    ] = "0.7",
    device: Annotated[str, typer.Option(help="h200, h100, a100-80gb or l40s.")] = "h100",
    pair: Annotated[
        str, typer.Option(help="qwen3-8b/0.6b, glm-4-9b or vicuna-7b/68m.")
    ] = "qwen3-8b/0.6b",
    times: Annotated[
        Path | None,
        typer.Option(help="Fitted times as JSON, instead of both.", exists=True, dir_okay=False),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8,
    draft_len: Annotated[
        int | None, typer.Option(min=0, help="Draft tokens per step; else chosen by cost.")
    ] = None,
    wait_rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds that a row waits at most; else the server's default."),
    ] = None,
    pool_cost: Annotated[
        str,
        typer.Option(help="What an event costs the pool: none, measured or microseconds."),
    ] = "measured",
    baseline: Annotated[
        str | None, typer.Option(help="eqspec: beside each, rows in order of arrival.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same figures.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture here.")] = None,
) -> None:
    """The real scheduler over many replicas in virtual time; see docs/simulate.md."""
    if sum(each is not None for each in (rate, in_flight, trace)) != 1:
        raise typer.BadParameter("give one of --rate, --in-flight and --trace")
    if bursts is not None and rate is None:
        raise typer.BadParameter("--bursts needs --rate")
    if trace is not None:
        _refuse_what_a_trace_says(context)
    if baseline not in (None, "eqspec"):
        raise typer.BadParameter("--baseline: expected eqspec")
    from cluster import simulate as runs
    from scheduler.messages import ReplicaSpec
    from scheduler.simulation import Setup, parse_acceptance, parse_lengths

    with _option_named("--prompt-tokens"):
        prompt_lengths = parse_lengths(prompt_tokens)
    if prompts is not None:
        with _option_named("--prompts"):
            prompt_lengths = _lengths_of(prompts)
    with _option_named("--new-tokens"):
        new_lengths = parse_lengths(new_tokens)
    with _option_named("--acceptance"):
        acceptance_mix = parse_acceptance(acceptance)
    load = _Load(
        requests=requests,
        rate=rate,
        bursts=None if bursts is None else _two("--bursts", bursts),
        trace=trace,
        per_replica=per_replica,
        prompts=prompt_lengths,
        new=new_lengths,
        acceptance=acceptance_mix,
    )
    hardware = _hardware(device, pair, times)
    spec = ReplicaSpec(
        kv_blocks=hardware.kv_blocks(_BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        context_len=32768,
        vocab_size=2,
    )
    config = _scheduler(batch_size, draft_len, wait_rounds)
    base = Setup(
        replicas=1,
        spec=spec,
        times=hardware.times,
        config=config,
        pool=_pool_times(pool_cost),
        in_flight=in_flight,
    )
    all_cases = runs.cases(
        base,
        _counts("--replicas", replicas),
        _counts("--shards", shards),
        baseline is not None,
        per_replica,
    )
    if any(case.setup.shards > case.setup.replicas for case in all_cases):
        raise typer.BadParameter("every shard needs a replica")
    for option, written in (("--json", json), ("--svg", svg)):
        if written is not None:
            with _option_named(option):
                check_writable(written)
    results = []
    for case in all_cases:
        if sys.stderr.isatty():
            typer.echo(f"{case.named()} ...", err=True)
        results.append(runs.run(case, load.drawn(case.setup.replicas, Random(seed)), seed))
    described = {
        "device": device if times is None else str(times.name),
        "pair": pair if times is None else None,
        "arrivals": load.described(in_flight),
        "prompt_tokens": None if trace else prompts.name if prompts else prompt_tokens,
        "new_tokens": None if trace else new_tokens,
        "acceptance": acceptance,
        "batch_size": batch_size,
        "draft_len": draft_len,
        "wait_rounds": config.wait_rounds,
        "kv_blocks": spec.kv_blocks,
        "pool_cost": None if base.pool is None else asdict(base.pool),
        "seed": seed,
    }
    _print(results)
    if json is not None:
        _write("--json", json, runs.to_json(described, results))
    if svg is not None:
        _write("--svg", svg, runs.picture(results))
    empty = [result for result in results if not result.figures.finished]
    for result in empty:
        typer.echo(f"{result.case.named()}: no request finished", err=True)
    if empty:
        raise typer.Exit(1)


_BLOCK_SIZE = 16


@dataclass(frozen=True)
class _Load:
    """What the options say of the requests."""

    requests: int
    rate: float | None
    bursts: tuple[float, float] | None
    trace: Path | None
    per_replica: bool
    prompts: Lengths
    new: Lengths
    acceptance: AcceptanceMix

    def drawn(self, replicas: int, rng: Random) -> Sequence[WorkloadRequest]:
        """The requests for so many replicas: the same for every case of as many replicas."""
        from scheduler.simulation import bursts, drawn, poisson, read_trace

        if self.trace is not None:
            with _option_named("--trace"):
                # Not splitlines: it also breaks where a JSON string may.
                lines = self.trace.read_text(encoding="utf-8").split("\n")
                return read_trace(lines, self.acceptance, rng)
        times = replicas if self.per_replica else 1
        arrivals = None
        if self.rate is not None and self.bursts is not None:
            arrivals = bursts(self.rate * times, *self.bursts, rng)
        elif self.rate is not None:
            arrivals = poisson(self.rate * times, rng)
        count = self.requests * times
        return drawn(arrivals, count, self.prompts, self.new, self.acceptance, rng)

    def described(self, in_flight: int | None) -> str:
        each = " for each replica" if self.per_replica else ""
        if self.trace is not None:
            return f"trace {self.trace.name}"
        if in_flight is not None:
            return f"closed loop, {in_flight} in flight{each}"
        if self.bursts is not None:
            on_s, off_s = self.bursts
            return f"{self.rate:g} requests/s for {on_s:g} s, then none for {off_s:g} s{each}"
        return f"Poisson, {self.rate:g} requests/s{each}"


def _scheduler(batch_size: int, draft_len: int | None, wait_rounds: int | None) -> SchedulerConfig:
    from pydantic import ValidationError

    from scheduler.config import SchedulerConfig

    try:
        return SchedulerConfig(
            rows_max=batch_size,
            draft_len=draft_len,
            wait_rounds=wait_rounds or SchedulerConfig().wait_rounds,
            # A queue is to be seen, so no request is refused for load.
            waiting_requests_max=10**9,
            waiting_tokens_max=10**12,
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        option = _OPTION_OF.get(name, _option(name))
        raise typer.BadParameter(f"{option}: {first['msg']}") from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse_what_a_trace_says(context: typer.Context) -> None:
    for name in _SAID_BY_A_TRACE:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise typer.BadParameter(f"{_option(name)}: a --trace says what comes and when")


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        typer.echo(f"{option}: {error}", err=True)
        raise typer.Exit(1) from None


@contextmanager
def _option_named(option: str) -> Iterator[None]:
    """What is wrong with a value is said with its option's name."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def _hardware(device: str, pair: str, times: Path | None) -> FittedTimes | Roofline:
    from scheduler.simulation import DEVICES, PAIRS, FittedTimes, Roofline

    if times is not None:
        with _option_named("--times"):
            return FittedTimes.model_validate_json(times.read_text(encoding="utf-8"))
    for option, name, known in (("--device", device, DEVICES), ("--pair", pair, PAIRS)):
        if name not in known:
            raise typer.BadParameter(f"{option}: expected one of {', '.join(known)}")
    return Roofline(DEVICES[device], *PAIRS[pair])


def _pool_times(text: str) -> PoolTimes | None:
    from scheduler.simulation import MEASURED_POOL, PoolTimes

    if text in ("none", "measured"):
        return MEASURED_POOL if text == "measured" else None
    try:
        each_s = float(text) * 1e-6
    except ValueError:
        each_s = -1.0
    if not 0 <= each_s < math.inf:
        raise typer.BadParameter(
            f"--pool-cost: expected none, measured or microseconds, got {text!r}"
        )
    return PoolTimes(batch_s=each_s, other_s=each_s)


def _lengths_of(prompts: Path) -> Lengths:
    from cluster.prompts import read_prompts

    texts = read_prompts(prompts)
    lengths = [max(round(len(text) / CHARACTERS_PER_TOKEN), 1) for text in texts]
    return lambda rng: rng.choice(lengths)


def _counts(option: str, text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"{option}: expected N or N,M,..., got {text!r}")
    return counts


def _two(option: str, text: str) -> tuple[float, float]:
    try:
        on_s, off_s = (float(part) for part in text.split(","))
    except ValueError:
        on_s = off_s = -1.0
    if not (0 < on_s < math.inf and 0 <= off_s < math.inf):
        raise typer.BadParameter(f"{option}: expected ON,OFF in seconds, got {text!r}")
    return on_s, off_s


def _print(results: list[Result]) -> None:
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
        "padding": f"{one['padding']:.1%}",
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
