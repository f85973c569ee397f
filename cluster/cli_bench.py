"""`lockstep bench`: its options, its progress bar, its table. The work is in `cluster.bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli_options import (
    Address,
    BatchSize,
    Device,
    Draft,
    DraftLen,
    Dtype,
    KeyFile,
    Target,
    TlsCa,
    TlsCert,
    TlsKey,
    cluster_config,
    given_options,
    reached_server,
)

if TYPE_CHECKING:
    from cluster.bench.report_json import Report


def bench(
    engine: Annotated[
        bool, typer.Option("--engine", help="An engine in this process, not a running cluster.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with 'prompt' or 'turns'.", exists=True, dir_okay=False),
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(help="Random prompts of N or N..M tokens instead.", metavar="N..M"),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Distinct prompts at most.")] = 64,
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many to send; 64 without --duration.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Send for so many seconds.")
    ] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before, not counted.")] = 8,
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many at a time; the default, 16.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Open loop: Poisson, requests per second.")
    ] = None,
    burst: Annotated[
        int | None, typer.Option(min=1, help="Open loop: so many at once, every --every seconds.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.001, help="Seconds between bursts.")] = 5.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per request.")] = 128,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="The end of a text ends its request.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep the k most probable; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set with this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens above this share.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, arrivals and sampling.")] = 0,
    draft_len: DraftLen = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Then: no drafting, and transformers' own ways, here."),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of --compare.")] = 3,
    compare_prompts: Annotated[int, typer.Option(min=1, help="Prompts of --compare.")] = 16,
    target: Target = None,
    draft: Draft = None,
    device: Device = None,
    dtype: Dtype = None,
    batch_size: BatchSize = None,
    html: Annotated[Path | None, typer.Option(help="Write the report here, one page.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
    address: Address = None,
    api_key_file: KeyFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Measure a running cluster, or with --engine the engine alone; see docs/benchmarks.md.

    --target, --draft, --device, --dtype and --batch-size are those of --engine and --compare.
    """
    if sum(each is not None for each in (in_flight, rate, burst)) > 1:
        raise typer.BadParameter("give one of --in-flight, --rate and --burst")
    if prompts is not None and prompt_tokens is not None:
        raise typer.BadParameter("give either --prompts or --prompt-tokens")
    if compare and temperature > 0:
        raise typer.BadParameter("--compare is greedy: transformers' sampling has other noise")
    for option, value in (("--top-p", top_p), ("--min-p", min_p)):
        if not 0 <= value <= 1:
            raise typer.BadParameter(f"{option} must be in [0, 1]")
    from cluster.bench.arrivals import Arrivals, Bursts, Closed, Extent, Poisson
    from cluster.bench.session import Plan
    from cluster.bench.workload import Lengths
    from scheduler.messages import SamplingParams

    arrivals: Arrivals = Closed(in_flight or 16)
    if rate is not None:
        arrivals = Poisson(rate, seed)
    if burst is not None:
        arrivals = Bursts(burst, every)
    try:
        lengths = None if prompt_tokens is None else Lengths.parse(prompt_tokens)
    except ValueError as error:
        raise typer.BadParameter(f"--prompt-tokens: {error}") from None
    if requests is None and duration is None:
        requests = 64
    plan = Plan(
        arrivals=arrivals,
        extent=Extent(requests, duration),
        warm_up=warm_up,
        prompts=prompts,
        prompt_tokens=lengths,
        limit=limit if requests is None else min(limit, requests),
        seed=seed,
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(temperature, top_k, top_p, min_p, seed),
        ignore_eos=not stop_at_eos,
        draft_len=draft_len,
        compare=compare,
        rounds=rounds,
        compare_prompts=compare_prompts,
    )
    given = given_options(
        target=target, draft=draft, device=device, dtype=dtype, batch_size=batch_size
    )
    config = cluster_config(None, given)
    server = None if engine else reached_server(address, api_key_file, tls_ca, tls_cert, tls_key)
    raise typer.Exit(_run(plan, config, server, html, json))


def _run(plan: Any, config: Any, server: Any, html: Path | None, json: Path | None) -> int:
    """Returns the exit status: 1 if a request failed or the server could not be asked."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
    from transformers.utils import logging as transformers_logging

    from cluster.bench.report_html import to_html
    from cluster.bench.report_json import to_json
    from cluster.bench.session import run_on_cluster, run_on_engine
    from scheduler.errors import LockstepError

    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}"),
        TimeElapsedColumn(),
        console=notes,
        disable=not sys.stderr.isatty(),
    )
    task: dict[str, TaskID] = {}

    def note(phase: str, done: int, total: int | None) -> None:
        if phase not in task:
            task[phase] = progress.add_task(phase, total=total)
        progress.update(task[phase], completed=done)

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        with progress:
            report = (
                run_on_engine(plan, config, note)
                if server is None
                else run_on_cluster(plan, config, server, note)
            )
        for path, text in ((html, to_html), (json, to_json)):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text(report), encoding="utf-8")
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, LockstepError) as error:
        notes.print(str(error))
        return 2
    except Exception as error:
        import grpc

        if not isinstance(error, grpc.RpcError):
            raise
        notes.print(f"{server.address}: {error.code().name}: {error.details()}")
        return 1
    _print(report, Console(highlight=False))
    return 1 if report.summary.failed else 0


def _print(report: Report, console: Any) -> None:
    from rich.table import Table

    from cluster.bench.report_html import number, percent

    figures = report.summary
    times = Table("milliseconds", "mean", "p50", "p90", "p99", "most", title="Times")
    for name, each in (
        ("time to first token", figures.ttft_s),
        ("time per output token", figures.token_s),
        ("inter-token latency", figures.gap_s),
        ("latency", figures.latency_s),
    ):
        if each is not None:
            values = (each.mean, each.p50, each.p90, each.p99, each.max)
            times.add_row(name, *(number(1000 * value) for value in values))
    console.print(times)
    errors = ", ".join(f"{code} {count}" for code, count in sorted(figures.errors.items()))
    rows = {
        "tokens/s": number(figures.tokens_per_s),
        "requests/s": number(figures.requests_per_s),
        "requests, failed": f"{figures.requests}, {figures.failed} {errors}".strip(),
        "retries, recovered": f"{figures.retries}, {figures.recovered}",
        "prompt tokens, cached": f"{figures.prompt_tokens}, {figures.cached_tokens}",
        "draft tokens accepted": f"{percent(figures.acceptance)} of {figures.draft_tokens}",
        "drafted per row and step": number(figures.drafted_per_step),
        "accepted per row and step": number(figures.accepted_per_step),
        "committed per row and step": number(figures.committed_per_step),
        "accepted by position": " ".join(percent(share) for share in figures.accepted_at) or "-",
        "spread of a group, tokens": number(figures.spread_mean),
        "padding": percent(figures.padding),
    }
    table = Table(show_header=False, title=str(report.settings["arrivals"]))
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    if report.comparison is None:
        return
    compared = Table(
        "way", "tokens/s", f"identical of {report.comparison.prompts}", title="Comparison"
    )
    for way in report.comparison.contenders:
        if way.does_not_run:
            compared.add_row(way.name, "does not run", way.does_not_run)
        else:
            compared.add_row(way.name, number(way.speed), str(way.identical))
    console.print(compared)
    ratios = Table("ratio, within a round", "median", "each round")
    for ratio in report.comparison.ratios:
        each_round = ", ".join(f"{value:.2f}" for value in ratio.values)
        ratios.add_row(ratio.name, f"{ratio.median:.2f}", each_round)
    console.print(ratios)
