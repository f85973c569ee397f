"""`lockstep bench`: its options, its progress bar, its table. The work is in `cluster.bench`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cluster.cli.client_flags import with_request, with_server
from cluster.cli.flags import ENGINE, lengths, output, with_settings, write

if TYPE_CHECKING:
    from cluster.bench.report import Report

SEED_MAX = 2**62
"""Each request of a run has the next seed, and all are below 2**63."""
_SERVER = ("address", "tls_ca", "tls_cert", "tls_key")
"""Options that say how gRPC reaches a cluster."""
NEW_TOKENS = 128
"""Of a request, where no other number is given."""


@with_server
@with_settings(*ENGINE)
@with_request("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "draft_len")
def bench(
    settings: Any,
    server: Any,
    request: Any,
    context: typer.Context,
    engine: Annotated[
        bool, typer.Option("--engine", help="Measure one replica in this process.")
    ] = False,
    openai: Annotated[
        str | None,
        typer.Option(
            help="A server of OpenAI's API, as http://localhost:8000, which gets the API key if"
            " there is one; needs --prompts.",
            metavar="URL",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model for --openai. Default: the first of /v1/models.")
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="Endpoint for --openai.")
    ] = "completions",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts: JSON lines with 'prompt' or 'turns'.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    prompt_tokens: Annotated[
        str | None, lengths("Random prompts of so many tokens; the default, 64..256.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum of distinct prompts.")] = 64,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Number of requests. Default: 64 without --duration.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Send requests for this many seconds.")
    ] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="First requests, which do not count.")] = 8,
    in_flight: Annotated[
        int | None,
        typer.Option(min=1, help="Closed loop with this many requests at a time. Default: 16."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Open loop: requests per second, Poisson arrivals."),
    ] = None,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="End a request at an end-of-text token.")
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=SEED_MAX, help="Seed of prompts, arrivals and sampling.")
    ] = 0,
    html: Annotated[Path | None, output("Write the report to this file, as one page.")] = None,
    json: Annotated[Path | None, output("Write the figures to this file.")] = None,
) -> None:
    """Measure a running cluster. --engine measures one replica without a cluster, --openai
    any server of OpenAI's API. See docs/benchmarks.md.

    Settings need --engine. Each request gets 128 new tokens, unless --max-new-tokens is given.
    """
    given = [
        f"{section}.{field}"
        for section in ENGINE
        for field in sorted(getattr(settings, section).model_fields_set)
    ]
    if given and not engine:
        raise typer.BadParameter(f"{', '.join(given)}: needs --engine")
    if openai and (engine or "draft_len" in request):
        raise typer.BadParameter("--openai cannot be combined with --engine or --draft-len")
    if not openai and (model is not None or endpoint == "chat"):
        raise typer.BadParameter("--model and --endpoint need --openai")
    # The environment may name a server, too; that is no wish of this call.
    said = [name for name in _SERVER if context.params.get(name) is not None]
    if said and (engine or openai):
        flags = ", ".join("--" + name.replace("_", "-") for name in said)
        raise typer.BadParameter(f"{flags}: cannot be combined with --engine or --openai")
    if in_flight is not None and rate is not None:
        raise typer.BadParameter("give either --in-flight or --rate")
    if prompts is not None and prompt_tokens is not None:
        raise typer.BadParameter("give either --prompts or --prompt-tokens")
    if openai and prompts is None:
        raise typer.BadParameter("--openai needs --prompts")
    from cluster.bench import session
    from cluster.bench.arrivals import Closed, Extent, Poisson
    from cluster.local.console import Bars

    if requests is None and duration is None:
        requests = 64
    options = {"max_new_tokens": NEW_TOKENS} | ({} if stop_at_eos else {"ignore_eos": True})
    plan = session.Plan(
        arrivals=Closed(in_flight or 16) if rate is None else Poisson(rate, seed),
        extent=Extent(requests, duration),
        warm_up=warm_up,
        prompts=prompts,
        prompt_tokens=prompt_tokens or "64..256",
        limit=limit if requests is None else min(limit, requests),
        seed=seed,
        options=options | request,
    )
    bars = Bars()

    def service() -> Any:
        if openai:
            return session.openai(openai, server.api_key, model, endpoint == "chat")
        return session.engine(settings, bars.note) if engine else session.cluster(server)

    report = _measured(plan, service, bars, server)
    _print(report)
    from cluster.bench.report import to_html, to_json

    write(json, lambda: to_json(report))
    write(html, lambda: to_html(report))
    raise typer.Exit(1 if report.summary.failed else 0)


def _measured(plan: Any, service: Any, bars: Any, server: Any) -> Report:
    """Ends the command with status 1 where the server could not be asked, with 2 where what was
    asked for cannot be measured."""
    import grpc

    from cluster.bench.session import measure
    from cluster.bench.workload import Unanswered
    from cluster.cli.client_flags import failure
    from cluster.local.console import console

    notes = console(stderr=True)
    try:
        with bars:
            # An engine loads outside of the event loop, which would keep the first Ctrl-C.
            begun = service()
            return asyncio.run(measure(plan, begun, bars.note))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (ValueError, OSError) as error:
        notes.print(str(error))
        raise typer.Exit(1 if isinstance(error, Unanswered) else 2) from None
    except grpc.RpcError as error:
        notes.print(failure(server, error))
        raise typer.Exit(1) from None


def _print(report: Report) -> None:
    from rich.table import Table

    from cluster.bench.report import load_tables
    from cluster.local.console import console

    out = console()
    out.print(str(report.settings["arrivals"]))
    for table in load_tables(report):
        shown = Table(*table.header, title=table.title, show_header=bool(table.header))
        for row in table.rows:
            shown.add_row(*row)
        out.print(shown)
