"""The command `lockstep`. Options only; what takes longer than parsing is imported when needed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster import lockstep_version
from cluster.cli.bench import bench
from cluster.cli.client_flags import PriorityName, with_request, with_server
from cluster.cli.flags import ENGINE, PARSERS, SectionedCommand, help_of, with_settings
from cluster.cli.simulate import simulate
from cluster.cli.train_drafter import train_drafter
from cluster.config import ConfigError, ServerConfig
from cluster.config_sources import from_args, text_of
from cluster.frontend.admission import keys as store

main = typer.Typer(
    name="lockstep",
    help="Serves language models with batch speculative decoding that changes no output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", help="Print the log lines of Ray and Serve, which are else only in files."
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lockstep {lockstep_version()}")
        raise typer.Exit()


@main.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="The version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@main.command(cls=SectionedCommand)
@with_settings("", *ENGINE, "server", *PARSERS, "auth", model=True)
def serve(
    settings: Any,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="A single key that every request needs. Other users of this machine can read a"
            " command line, so better set LOCKSTEP_API_KEY, which applies if neither --keys-file"
            " nor --allow-anyone is given."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a target on the hub.")
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Replace the application if the Ray to join serves already. The application ends"
            " with this command.",
        ),
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM. Running requests then have actors.drain_s to finish."""
    from cluster.cli.serve import at_revision, serve_until_signal, with_key, with_paths
    from cluster.frontend.admission.control import check_exposure
    from cluster.frontend.bounded import check_template

    with _errors():
        if revision is not None:
            settings = at_revision(settings, revision)
        settings = with_paths(settings)
        if settings.replica.chat_template is not None:
            check_template(text_of(Path(settings.replica.chat_template)), "chat_template")
        settings = with_key(settings, api_key)
        check_exposure(settings)
        if settings.auth.keys_file is not None:
            store.read(Path(settings.auth.keys_file))
    raise typer.Exit(serve_until_signal(settings, verbose, replace))


@main.command()
@with_server
@with_request()
def generate(
    server: Any,
    request: Any,
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from stdin.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer as one JSON object.")
    ] = False,
) -> None:
    """Generate text and stream it to stdout."""
    from cluster.cli.generate import generate as stream

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise typer.BadParameter("prompt: not UTF-8") from None
    raise typer.Exit(stream(server, text, request, as_json))


@main.command(cls=SectionedCommand)
@with_settings(*ENGINE, model=True)
@with_request("max_new_tokens", "temperature", "seed")
def verify(
    settings: Any,
    request: Any,
    prompts: Annotated[
        Path,
        typer.Option(help="File of prompts: JSON lines with 'prompt' or 'turns'.", exists=True),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
) -> None:
    """Compare every token with those of the target alone; exit status 1 if any differs.

    Each prompt gets 128 new tokens, unless --max-new-tokens is given.
    """
    from cluster import verify as verifying
    from cluster.local.console import Bars, console
    from cluster.prompt_files import read_prompts
    from cluster.worker.loading import tell_of_weights
    from scheduler.errors import InvalidRequest
    from scheduler.messages import Sampling

    max_new_tokens = request.pop("max_new_tokens", 128)
    try:
        texts = read_prompts(prompts, limit)
        with Bars() as bars:
            tell_of_weights(lambda done, total: bars.note("weights", done, total))
            report = verifying.verify(
                texts,
                settings.planned_replica,
                settings.scheduler,
                Sampling(**request),
                max_new_tokens,
                bars.note,
            )
    except (InvalidRequest, OSError, ValueError) as error:
        console(stderr=True).print(str(error))
        raise typer.Exit(2) from None
    console().print("\n".join(report.said()))
    raise typer.Exit(1 if len(report.differences) > report.ties else 0)


@main.command(cls=SectionedCommand)
@with_settings("replica", "scheduler.draft_len_max", model=True)
def plan(
    settings: Any,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """Show how a replica, or each of its ranks, would divide its memory; reads no weights.

    --config plans for `lockstep serve --config`; other options override the file. With --memory
    the GPU need not be in this machine. The exit status is 1 if one sequence of full context does
    not fit; the message then names the least memory that would suffice.
    """
    from cluster.cli.plan import planned_of, print_plan

    raise typer.Exit(print_plan(planned_of(settings), as_json))


@main.command()
@with_server
def status(
    server: Any,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every second.")] = False,
) -> None:
    """Show the state of the pool and its replicas."""
    from cluster.cli.status import print_status

    if watch and as_json:
        raise typer.BadParameter("--watch: not with --json")
    raise typer.Exit(print_status(server, as_json, watch))


@main.command()
@with_server
@with_request("max_new_tokens", "temperature")
def chat(
    server: Any,
    request: Any,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
) -> None:
    """Talk with the model of a running server. Ctrl-C stops an answer, Ctrl-D ends the talk."""
    from cluster.cli.chat import chat as talk

    try:
        (system or "").encode()
    except UnicodeError:
        raise typer.BadParameter("--system: not UTF-8") from None
    raise typer.Exit(talk(server, system, request))


@main.command()
def demo(
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas.")] = 2,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=2**31 - 1, help="Tokens per answer.")
    ] = 64,
    grpc_port: Annotated[int | None, typer.Option(help=help_of(ServerConfig, "grpc_port"))] = None,
    http_port: Annotated[int | None, typer.Option(help=help_of(ServerConfig, "http_port"))] = None,
    verbose: Verbose = False,
) -> None:
    """Start a cluster, stream eight answers, compare them with the target alone, then stop all."""
    from cluster.cli.demo import run_demo

    ports = {"server.grpc_port": grpc_port, "server.http_port": http_port}
    given = {"replicas": replicas, **ports}
    with _errors():
        settings = from_args({name: value for name, value in given.items() if value is not None})
    raise typer.Exit(run_demo(settings, max_new_tokens, verbose))


keys = typer.Typer(help="API keys: add, list, remove.", no_args_is_help=True)
File = Annotated[Path, typer.Option("--file", help="The file of keys.", dir_okay=False)]


@keys.command()
def add(
    name: Annotated[str, typer.Argument(help=help_of(store.KeyEntry, "name"))],
    file: File,
    priority_max: Annotated[
        PriorityName, typer.Option(help=help_of(store.KeyEntry, "priority_max"))
    ] = PriorityName.NORMAL,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help=help_of(store.KeyEntry, "tokens_per_minute"))
    ] = None,
    requests_max: Annotated[
        int | None, typer.Option(min=1, help=help_of(store.KeyEntry, "requests_max"))
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help=help_of(store.KeyEntry, "operator"))
    ] = False,
) -> None:
    """Make a key, print it, and store its hash. Creates the file if it does not exist."""
    with _errors():
        key = store.add(file, name, priority_max.value, tokens_per_minute, requests_max, operator)
    typer.echo(key)
    typer.echo(f"The key of {name}; it is not stored and cannot be shown again.", err=True)


@keys.command("list")
def show(file: File) -> None:
    """List names and limits."""
    with _errors():
        entries = store.read(file)
    for entry in entries:
        limits = [f"priority up to {entry.priority_max}"]
        if entry.tokens_per_minute is not None:
            limits.append(f"{entry.tokens_per_minute} tokens per minute")
        if entry.requests_max is not None:
            limits.append(f"{entry.requests_max} requests in flight")
        if entry.operator:
            limits.append("operator")
        typer.echo(f"{entry.name}  {', '.join(limits)}")


@keys.command()
def remove(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    file: File,
) -> None:
    """Remove a key. Running requests finish; new ones are refused within a second."""
    with _errors():
        store.remove(file, name)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (ConfigError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


main.command(cls=SectionedCommand)(bench)
main.command(cls=SectionedCommand)(simulate)
main.command(cls=SectionedCommand)(train_drafter)
main.add_typer(keys, name="keys")

if __name__ == "__main__":
    main()
