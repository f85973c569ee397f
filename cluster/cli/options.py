"""Options that several commands share, and what they become. Imports nothing heavy."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class PriorityName(StrEnum):
    """`protos`' classes, by name."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


Address = Annotated[
    str | None,
    typer.Option(help="host:port of the server; else LOCKSTEP_ADDRESS, else this machine."),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="File with the API key; else LOCKSTEP_API_KEY.", exists=True, dir_okay=False),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(help="Speak TLS; the server's authority, in PEM.", exists=True, dir_okay=False),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(help="Speak TLS; the client's own certificate.", exists=True, dir_okay=False),
]
TlsKey = Annotated[
    Path | None, typer.Option(help="Key of --tls-cert, in PEM.", exists=True, dir_okay=False)
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(help="YAML file: settings, or a Serve config file.", exists=True, dir_okay=False),
]
ReplicaCount = Annotated[int | None, typer.Option(min=1, help="Number of replicas.")]
Target = Annotated[
    str | None,
    typer.Option(
        help="Target: 'smollm2', 'tiny', a directory, hub name or GGUF file.", metavar="NAME"
    ),
]
Draft = Annotated[str | None, typer.Option(help="Draft likewise; 'null' for none.", metavar="NAME")]
Speculative = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help="What drafts, as JSON: "
        """'{"method": "suffix", "num_speculative_tokens": 4}'; methods draft_model, suffix,"""
        " eagle3, none.",
        metavar="JSON",
    ),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
Memory = Annotated[
    str | None,
    typer.Option(help="Of a replica: weights, KV cache and buffers, as '20GiB'.", metavar="SIZE"),
]
Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic", help="In 16 bits too the same output in any group."
    ),
]
TensorParallel = Annotated[
    int | None, typer.Option(min=1, help="Devices that hold the target together.")
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Rows of a group.")]
DraftLen = Annotated[int | None, typer.Option(min=0, help="Draft tokens per step; 0 is off.")]

Priority = Annotated[
    PriorityName | None, typer.Option(help="Class in the queue; waiting ages, so none starves.")
]
CacheSalt = Annotated[
    str | None,
    typer.Option(help="Share KV blocks of equal prefixes only with requests of the same salt."),
]


def given_options(**options: Any) -> dict[str, Any]:
    """The options that were given; the others keep the defaults of the configuration."""
    return {name: value for name, value in options.items() if value not in (None, [])}


def cluster_config(
    path: Path | None, given: dict[str, Any], replica: dict[str, Any] | None = None
) -> Any:
    """The file's settings with those given; what is wrong with them is a wrong parameter.

    `replica`: settings of that section that have no short name.
    """
    from cluster.config import ConfigError, from_args, from_file, overridden

    try:
        if path is None:
            return from_args(given | {"replica": replica} if replica else given)
        config = from_file(path)
        if replica:
            # A section stands for all of itself; the short names come after it, and win.
            given = {"replica": config.replica.model_dump(exclude_unset=True) | replica} | given
        return overridden(config, given)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def reached_server(
    address: str | None, key_file: Path | None, ca: Path | None, cert: Path | None, key: Path | None
) -> Any:
    """How to reach the server that the options name."""
    from cluster.client.channel import Server, Tls
    from cluster.config import ConfigError, api_key, server_address

    try:
        tls = Tls(ca, cert, key) if ca or cert or key else None
        if tls is not None:
            tls.credentials()
        return Server(address or server_address(), api_key(key_file), tls)
    except (ConfigError, OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
