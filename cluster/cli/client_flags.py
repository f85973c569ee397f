"""What the commands of clients share: flags for the server and the fields of a request, and why a
call failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.flags import Command, adding, keyword, parameters_of
from cluster.config import ConfigError
from cluster.config_sources import api_key, server_address

if TYPE_CHECKING:
    import grpc

    from cluster.client.channel import Server


def with_server(command: Command) -> Command:
    """A command that gets the `server` to speak to, a `cluster.client.channel.Server`."""
    return adding("server", parameters_of(_server), lambda options: _server(**options))(command)


class PriorityName(StrEnum):
    """The queue's classes, as people write them."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


_REQUEST: Mapping[str, tuple[Any, str]] = {
    "max_new_tokens": (int, "Maximum of new tokens."),
    "temperature": (float, "0 is greedy."),
    "top_k": (int, "Keep the k most probable tokens."),
    "top_p": (float, "Keep the most probable tokens with this total probability."),
    "min_p": (float, "Keep tokens with at least this share of the highest probability."),
    "seed": (int, "The same seed gives the same tokens."),
    "stop": (list[str], "Stop string; repeat the option for several."),
    "stop_token_ids": (list[int], "Stop token; repeat the option for several."),
    "ignore_eos": (bool, "Continue after end-of-text tokens."),
    "speculation": (bool, "Whether drafts are used for these requests."),
    "draft_len": (int, "Draft tokens per step; 0 is off."),
    "priority": (PriorityName, "Priority class; a waiting request rises with time."),
    "cache_salt": (str, "Share KV blocks of equal prefixes only with requests of the same salt."),
    "timeout_s": (float, "Deadline of each request."),
}
"""Fields of a GenerateRequest that are options: their types, and help for people."""


def with_request(*fields: str) -> Callable[[Command], Command]:
    """A command that gets the `request`: those of these fields that were given, by name.

    Without `fields` all of them are options.
    """
    added = []
    for field in fields or _REQUEST:
        type_, help_ = _REQUEST[field]
        flag = "--" + field.replace("_", "-").replace("-ids", "-id")
        if type_ is bool:
            flag += "/--no-" + flag.removeprefix("--")
        added.append(keyword(field, Annotated[type_ | None, typer.Option(flag, help=help_)]))

    def request(options: dict[str, Any]) -> dict[str, Any]:
        given = {name: value for name, value in options.items() if value not in (None, [])}
        if "priority" in given:
            given["priority"] = f"PRIORITY_{given['priority'].name}"
        from protos import lockstep_pb2 as pb

        for name, value in given.items():
            try:
                pb.GenerateRequest(**{name: value})
            except ValueError as error:
                raise typer.BadParameter(f"{name}: {error}") from None
        return given

    return adding("request", added, request)


def _file(help_: str) -> Any:
    return typer.Option(help=help_, exists=True, dir_okay=False)


def _server(
    address: Annotated[
        str | None,
        typer.Option(help="host:port of the server. Default: LOCKSTEP_ADDRESS, or this machine."),
    ] = None,
    api_key_file: Annotated[
        Path | None, _file("File with the API key; else LOCKSTEP_API_KEY.")
    ] = None,
    tls_ca: Annotated[Path | None, _file("Speak TLS; the server's authority, in PEM.")] = None,
    tls_cert: Annotated[Path | None, _file("Speak TLS; the client's own certificate.")] = None,
    tls_key: Annotated[Path | None, _file("Key of --tls-cert, in PEM.")] = None,
) -> Any:
    from cluster.client.channel import Server, Tls

    try:
        tls = Tls(tls_ca, tls_cert, tls_key) if tls_ca or tls_cert or tls_key else None
        if tls is not None:
            tls.credentials()
        return Server(address or server_address(), api_key(api_key_file), tls)
    except (ConfigError, OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


def failure(server: Server, error: grpc.RpcError) -> str:
    """Why a call to the server failed."""
    if error.code().name == "UNAVAILABLE" and "connect" in (error.details() or ""):
        return f"No server answers at {server.address}; `lockstep serve` starts one."
    return f"{server.address}: {error.code().name}: {error.details()}"
