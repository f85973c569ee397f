"""The command `lockstep keys`: makes API keys, lists them and takes them away.

A running server reads the file again within a second. A key is shown once, when it is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.flags import PriorityName

keys = typer.Typer(help="API keys: add, list, remove.", no_args_is_help=True)


File = Annotated[Path, typer.Option("--file", help="The file of keys.", dir_okay=False)]


@keys.command()
def add(
    name: Annotated[str, typer.Argument(help="Whom its requests count for.")],
    file: File,
    priority_max: Annotated[
        PriorityName, typer.Option(help="The highest class that it may ask for.")
    ] = PriorityName.NORMAL,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Prompt and new tokens; no limit unless given.")
    ] = None,
    requests_max: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight; no limit unless given.")
    ] = None,
) -> None:
    """Make a key, print it, and store its hash. The file is made if need be."""
    from cluster.frontend.admission import keys as store

    with _errors():
        key = store.add(file, name, priority_max.value, tokens_per_minute, requests_max)
    typer.echo(key)
    typer.echo(f"The key of {name}; nobody can show it again.", err=True)


@keys.command("list")
def show(file: File) -> None:
    """Names and limits, one line each."""
    from cluster.frontend.admission import keys as store

    with _errors():
        entries = store.read(file)
    for entry in entries:
        limits = [f"priority up to {entry.priority_max}"]
        if entry.tokens_per_minute is not None:
            limits.append(f"{entry.tokens_per_minute} tokens per minute")
        if entry.requests_max is not None:
            limits.append(f"{entry.requests_max} requests in flight")
        typer.echo(f"{entry.name}  {', '.join(limits)}")


@keys.command()
def remove(
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    file: File,
) -> None:
    """Take a key away. Requests that are running finish; new ones are refused within a second."""
    from cluster.frontend.admission import keys as store

    with _errors():
        store.remove(file, name)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    from cluster.config import ConfigError

    try:
        yield
    except (ConfigError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
