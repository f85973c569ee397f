"""`lockstep bench`: its options, its progress bar, its table. The work is in `cluster.bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cluster.cli.client_flags import help_of_request, with_server
from cluster.cli.flags import ENGINE, is_given, with_settings
from cluster.files import check_writable

if TYPE_CHECKING:
    from rich.console import Console

    from cluster.bench.report import Report, Table

INT32_MAX = 2**31 - 1
"""Greatest of most numbers in a request."""
_ONLY_WITH = {"every": "burst", "rounds": "compare", "compare_prompts": "compare"}
"""Options that do nothing without another one."""
SEED_MAX = 2**62
"""Each request of a run has the next seed, and all are below 2**63."""


@with_server
@with_settings(*ENGINE)
def bench(
    context: typer.Context,
    settings: Any,
    server: Any,
    engine: Annotated[
        bool, typer.Option("--engine", help="An engine in this process, not a running cluster.")
    ] = False,
    openai: Annotated[
        list[str] | None,
        typer.Option(
            help="A server of OpenAI's API, as http://localhost:8000, which gets the API key if"
            " there is one; several are measured in turn and shown side by side.",
            metavar="URL",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Of --openai; else the first of its /v1/models.")
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="Of --openai; chat needs --prompts.")
    ] = "completions",
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
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=INT32_MAX, help="Tokens per request.")
    ] = 128,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="The end of a text ends its request.")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0, help=help_of_request("temperature"))] = 0.0,
    top_k: Annotated[
        int, typer.Option(min=0, max=INT32_MAX, help="Keep the k most probable; 0: all.")
    ] = 0,
    top_p: Annotated[float, typer.Option(help=help_of_request("top_p"))] = 1.0,
    min_p: Annotated[float, typer.Option(help=help_of_request("min_p"))] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, max=SEED_MAX, help="Of prompts, arrivals and sampling.")
    ] = 0,
    draft_len: Annotated[int | None, typer.Option(min=0, help=help_of_request("draft_len"))] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Then: no drafting, and transformers' own ways, here."),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of --compare.")] = 3,
    compare_prompts: Annotated[int, typer.Option(min=1, help="Prompts of --compare.")] = 16,
    html: Annotated[Path | None, typer.Option(help="Write the report here, one page.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """Measure a running cluster, or with --engine the engine alone, or with --openai any
    server of OpenAI's API; see docs/benchmarks.md.

    The settings are those of --engine and --compare.
    """
    if sum(each is not None for each in (in_flight, rate, burst)) > 1:
        raise typer.BadParameter("give one of --in-flight, --rate and --burst")
    for name, other in _ONLY_WITH.items():
        if is_given(context, name) and not context.params[other]:
            raise typer.BadParameter(f"--{name.replace('_', '-')}: only with --{other}")
    given = [
        f"{section}.{field}"
        for section in ENGINE
        for field in sorted(getattr(settings, section).model_fields_set)
    ]
    if given and not (engine or compare):
        raise typer.BadParameter(f"{', '.join(given)}: only with --engine or --compare")
    if openai and (engine or compare or draft_len is not None):
        raise typer.BadParameter("--openai: not with --engine, --compare and --draft-len")
    if openai and prompt_tokens is not None:
        raise typer.BadParameter(
            "--prompt-tokens: not with --openai, whose servers do not tell their vocabulary;"
            " give --prompts"
        )
    if not openai and (model is not None or endpoint == "chat"):
        raise typer.BadParameter("--model, --endpoint: only with --openai")
    if endpoint == "chat" and prompts is None:
        raise typer.BadParameter("--endpoint chat: needs --prompts")
    if prompts is not None and prompt_tokens is not None:
        raise typer.BadParameter("give either --prompts or --prompt-tokens")
    if compare and temperature > 0:
        raise typer.BadParameter(
            f"--compare: only with --temperature 0, is {temperature:g}: transformers' sampling has"
            " other noise"
        )
    for option, value in (("--top-p", top_p), ("--min-p", min_p)):
        if not 0 <= value <= 1:
            raise typer.BadParameter(f"{option}: must be in [0, 1], is {value:g}")
    from cluster.bench.arrivals import Arrivals, Bursts, Closed, Extent, Poisson
    from cluster.bench.session import Plan
    from scheduler.messages import SamplingParams
    from scheduler.simulation import parse_lengths

    arrivals: Arrivals = Closed(in_flight or 16)
    if rate is not None:
        arrivals = Poisson(rate, seed)
    if burst is not None:
        arrivals = Bursts(burst, every)
    try:
        if prompt_tokens is not None:
            parse_lengths(prompt_tokens)
    except ValueError as error:
        raise typer.BadParameter(f"--prompt-tokens: {error}") from None
    if requests is None and duration is None:
        requests = 64
    plan = Plan(
        arrivals=arrivals,
        extent=Extent(requests, duration),
        warm_up=warm_up,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        limit=limit if requests is None else min(limit, requests),
        seed=seed,
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(temperature, top_k, top_p, min_p, seed),
        ignore_eos=not stop_at_eos,
        draft_len=draft_len,
        compare=compare,
        rounds=rounds,
        compare_prompts=compare_prompts,
        model=model,
        chat=endpoint == "chat",
    )
    urls = dict.fromkeys(openai or ())
    raise typer.Exit(_run(plan, settings, None if engine else server, list(urls), html, json))


def _run(
    plan: Any, config: Any, server: Any, urls: list[str], html: Path | None, json: Path | None
) -> int:
    """Returns the exit status: 1 if a request or the comparison failed, the server could not be
    asked or a report not be written; 2 if nothing was measured, for what was asked cannot be."""
    from transformers.utils import logging as transformers_logging

    from cluster.bench.page import to_html
    from cluster.bench.report import to_json, write_each
    from cluster.bench.session import run_on_cluster, run_on_engine, run_on_openai
    from cluster.cli.terminal import Bars, console, failure
    from cluster.worker.loading import tell_of_weights
    from scheduler.errors import LockstepError

    notes, out = console(stderr=True), console()
    outputs = [
        (path, text) for path, text in ((html, to_html), (json, to_json)) if path is not None
    ]
    transformers_logging.set_verbosity_error()
    bars = Bars()
    tell_of_weights(lambda done, total: bars.note("weights", done, total))
    report: Report | None = None
    unwritten: list[str] = []
    try:
        for path, _ in outputs:
            check_writable(path)
        if urls:
            reports = run_on_openai(plan, urls, server.api_key, bars.note)
        elif server is None:
            reports = run_on_engine(plan, config, bars.note)
        else:
            reports = run_on_cluster(plan, config, server, bars.note)
        while True:
            with bars:
                found = next(reports, None)
            if found is None:
                break
            try:
                (_print_load if report is None else _print_comparison)(found, out)
            finally:
                unwritten = write_each(found, outputs)
            for said in unwritten:
                notes.print(said)
            report = found
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, LockstepError) as error:
        notes.print(str(error))
        return 2
    except Exception as error:
        import grpc

        if not isinstance(error, grpc.RpcError):
            raise
        notes.print(failure(server, error))
        return 1
    assert report is not None, "a run gives a report"
    failed = any(each.failed for each in (report.summary, *report.servers.values()))
    return 1 if failed or report.not_compared or unwritten else 0


def _print_load(report: Report, out: Console) -> None:
    from cluster.bench.report import load_tables

    out.print(str(report.settings["arrivals"]))
    _print_tables(load_tables(report), out)
    for said in report.notes:
        out.print(said)


def _print_comparison(report: Report, out: Console) -> None:
    from cluster.bench.report import comparison_tables

    if report.comparison is None:
        out.print(f"Not compared: {report.not_compared}")
        return
    _print_tables(comparison_tables(report.comparison), out)
    out.print(report.comparison.said())


def _print_tables(tables: list[Table], out: Console) -> None:
    from rich.table import Table as Shown

    for table in tables:
        shown = Shown(*table.header, title=table.title, show_header=bool(table.header))
        for row in table.rows:
            shown.add_row(*row)
        out.print(shown)
