"""`lockstep simulate`: its options and its table. The work is in `cluster.simulate`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import typer

from cluster import simulate as runs
from cluster.cli.flags import is_given, with_settings
from cluster.files import check_writable, read_prompts
from cluster.sentences import did_you_mean
from scheduler.messages import ReplicaSpec
from scheduler.simulation import (
    DEVICES,
    MEASURED_POOL,
    PAIRS,
    FittedTimes,
    Lengths,
    PoolTimes,
    Roofline,
    Setup,
    WorkloadRequest,
    bursts as bursty,
    drawn,
    parse_acceptance,
    parse_lengths,
    poisson,
    read_trace,
)

CHARACTERS_PER_TOKEN = 4
"""By which the lengths of prompts in a file are estimated."""

_BLOCK_SIZE = 16
_SAID_BY_A_TRACE = ("requests", "per_replica", "prompt_tokens", "prompts", "new_tokens")


@dataclass(frozen=True)
class _Said:
    """An option's text, and what it means."""

    text: str
    value: Any


def _read_by(parse: Callable[[str], Any], help_: str, metavar: str) -> Any:
    """An option whose text is read by `parse`; its OSError or ValueError names the option."""

    def read(text: str) -> _Said:
        try:
            return _Said(text, parse(text))
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None

    return typer.Option(help=help_, parser=read, metavar=metavar)


def _known(table: Mapping[str, Any]) -> Callable[[str], Any]:
    def look(name: str) -> Any:
        if name not in table:
            near = did_you_mean(name, table)
            raise ValueError(f"expected one of {', '.join(table)}, got {name!r}{near}")
        return table[name]

    return look


def _name_in(table: Mapping[str, Any]) -> Any:
    """An option whose text is a name in the table."""
    return _read_by(_known(table), f"One of {', '.join(table)}.", "NAME")


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ValueError(f"expected N or N,M,..., got {text!r}")
    return counts


def _on_off(text: str) -> tuple[float, float]:
    try:
        on_s, off_s = (float(part) for part in text.split(","))
    except ValueError:
        on_s = off_s = -1.0
    if not (0 < on_s < math.inf and 0 <= off_s < math.inf):
        raise ValueError(f"expected ON,OFF in seconds, got {text!r}")
    return on_s, off_s


def _lengths_of_prompts(path: str) -> Lengths:
    lengths = [max(round(len(text) / CHARACTERS_PER_TOKEN), 1) for text in read_prompts(Path(path))]
    return lambda rng: rng.choice(lengths)


def _fitted(path: str) -> FittedTimes:
    return FittedTimes.model_validate_json(Path(path).read_text(encoding="utf-8"))


def _pool_times(text: str) -> PoolTimes | None:
    if text in ("none", "measured"):
        return MEASURED_POOL if text == "measured" else None
    try:
        each_s = float(text) * 1e-6
    except ValueError:
        each_s = -1.0
    if not 0 <= each_s < math.inf:
        raise ValueError(f"expected none, measured or microseconds, got {text!r}")
    return PoolTimes(batch_s=each_s, other_s=each_s)


def _to_write(path: str) -> Path:
    check_writable(Path(path))
    return Path(path)


@with_settings("scheduler")
def simulate(
    context: typer.Context,
    settings: Any,
    replicas: Annotated[
        Any, _read_by(_counts, "Number of replicas; several: one after the other.", "N,M")
    ] = "8",
    shards: Annotated[Any, _read_by(_counts, "Number of pools; several likewise.", "N,M")] = "1",
    requests: Annotated[int, typer.Option(min=1, help="How many requests come.")] = 2000,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="Poisson arrivals, requests per second.")
    ] = None,
    bursts: Annotated[
        Any, _read_by(_on_off, "With --rate: that for ON seconds, none for OFF.", "ON,OFF")
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
        Any, _read_by(parse_lengths, "N, N..M or lognormal:MEDIAN:SIGMA.", "LENGTHS")
    ] = "lognormal:200:0.8",
    prompts: Annotated[
        Any, _read_by(_lengths_of_prompts, "Lengths of these prompts instead.", "FILE")
    ] = None,
    new_tokens: Annotated[
        Any, _read_by(parse_lengths, "Likewise.", "LENGTHS")
    ] = "lognormal:200:0.6",
    acceptance: Annotated[
        Any,
        _read_by(parse_acceptance, "Of draft tokens; or a mix of requests, as 0.9:3,0.4:1.", "A"),
    ] = "0.7",
    device: Annotated[Any, _name_in(DEVICES)] = "h100",
    pair: Annotated[Any, _name_in(PAIRS)] = "qwen3-8b/0.6b",
    times: Annotated[
        Any, _read_by(_fitted, "Fitted times as JSON, instead of both.", "FILE")
    ] = None,
    pool_cost: Annotated[
        Any,
        _read_by(
            _pool_times, "Cost of an event in the pool: none, measured or microseconds.", "US"
        ),
    ] = "measured",
    baseline: Annotated[
        Literal["eqspec"] | None, typer.Option(help="Beside each, rows in order of arrival.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same figures.")] = 0,
    json: Annotated[Any, _read_by(_to_write, "Write the figures here.", "FILE")] = None,
    svg: Annotated[Any, _read_by(_to_write, "Write a picture here.", "FILE")] = None,
) -> None:
    """The real scheduler over many replicas in virtual time; see docs/simulate.md."""
    if sum(each is not None for each in (rate, in_flight, trace)) != 1:
        raise typer.BadParameter("give one of --rate, --in-flight and --trace")
    if bursts is not None and rate is None:
        raise typer.BadParameter("--bursts needs --rate")
    if trace is not None:
        _refuse_what_a_trace_says(context)

    def requests_for(count: int) -> Sequence[WorkloadRequest]:
        """Those that come to so many replicas: the same in every case of as many."""
        rng, times = Random(seed), count if per_replica else 1
        if trace is not None:
            try:
                # Not splitlines: it also breaks where a JSON string may.
                lines = trace.read_text(encoding="utf-8").split("\n")
                return read_trace(lines, acceptance.value, rng)
            except (OSError, ValueError) as error:
                raise typer.BadParameter(f"--trace: {error}") from None
        arrivals = None
        if rate is not None:
            per_s = rate * times
            on_s, off_s = (0.0, 0.0) if bursts is None else bursts.value
            arrivals = bursty(per_s, on_s, off_s, rng) if bursts else poisson(per_s, rng)
        lengths = (prompts or prompt_tokens).value, new_tokens.value
        return drawn(arrivals, requests * times, *lengths, acceptance.value, rng)

    hardware = Roofline(device.value, *pair.value) if times is None else times.value
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
        pool=pool_cost.value,
        in_flight=in_flight,
    )
    all_cases = runs.cases(base, replicas.value, shards.value, baseline is not None, per_replica)
    if any(case.setup.shards > case.setup.replicas for case in all_cases):
        raise typer.BadParameter("every shard needs a replica")
    results = []
    for case in all_cases:
        if sys.stderr.isatty():
            typer.echo(f"{case.named()} ...", err=True)
        results.append(runs.run(case, requests_for(case.setup.replicas), seed))
    given = {name: getattr(each, "text", each) for name, each in context.params.items()}
    described = {
        "options": {name: each for name, each in given.items() if each is not None},
        "scheduler": config.model_dump(),
        "kv_blocks": spec.kv_blocks,
        "pool_cost": None if base.pool is None else asdict(base.pool),
    }
    _print(results)
    if json is not None:
        _write("--json", json, lambda: runs.to_json(described, results))
    if svg is not None:
        _write("--svg", svg, lambda: runs.picture(results))
    empty = [result for result in results if not result.figures.finished]
    for result in empty:
        typer.echo(f"{result.case.named()}: no request finished", err=True)
    if empty:
        raise typer.Exit(1)


def _write(option: str, path: _Said, text: Callable[[], str]) -> None:
    try:
        path.value.write_text(text(), encoding="utf-8")
    except (ImportError, OSError) as error:
        typer.echo(f"{option}: {error}", err=True)
        raise typer.Exit(1) from None


def _refuse_what_a_trace_says(context: typer.Context) -> None:
    for name in _SAID_BY_A_TRACE:
        if is_given(context, name):
            option = "--" + name.replace("_", "-")
            raise typer.BadParameter(f"{option}: a --trace says what comes and when")


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
