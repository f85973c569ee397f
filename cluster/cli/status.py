"""What `lockstep status` prints, within 80 columns."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import grpc
from google.protobuf.json_format import MessageToJson
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.cli.client_flags import failure
from cluster.client import Client
from cluster.client.channel import Server
from cluster.local.console import console
from protos import lockstep_pb2 as pb

_WATCH_S = 1.0
_LEGEND = "k: draft tokens; accepted: of greedy / sampled draft tokens"


def print_status(server: Server, as_json: bool, watch: bool) -> int:
    """Ask the server and print what it says, with `watch` until Ctrl-C. Returns the exit status."""
    try:
        with Client(server.address, server.api_key, server.tls) as client:
            if watch:
                watch_status(client.status)
            elif as_json:
                print(_json(client.status()))
            else:
                console().print(shown(client.status()))
    except grpc.RpcError as error:
        console(stderr=True).print(failure(server, error))
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def watch_status(ask: Callable[[], pb.StatusResponse]) -> None:
    with Live(console=console(), auto_refresh=False) as live:
        while True:
            live.update(shown(ask()), refresh=True)
            time.sleep(_WATCH_S)


def _json(status: pb.StatusResponse) -> str:
    return MessageToJson(
        status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def shown(status: pb.StatusResponse) -> RenderableType:
    """The pool, its shards, its replicas, and what is the same for several of them once."""
    parts: list[RenderableType] = [_summary(status)]
    if status.shards:
        parts += ["", _shards(status)]
    if status.replicas:
        parts += ["", _replicas(status), _LEGEND, ""]
    if drain := [each.id for each in status.replicas if each.draining]:
        parts.append(Text(f"draining: {', '.join(drain)}"))
    kinds = [_kind(each) for each in status.replicas]
    for kind in dict.fromkeys(kinds):
        count = kinds.count(kind)
        parts.append(Text(f"{count} replica{'s' * (count > 1)}: {kind}"))
    return Group(*parts)


def _summary(status: pb.StatusResponse) -> Table:
    per_row = status.tokens_committed / status.row_steps if status.row_steps else 0.0
    rows = {
        "ready": "yes" if status.ready else "no, it is stopping" if status.stopping else "no",
        "pool": f"{status.pool_incarnation}, up {status.pool_uptime_s:.0f} s",
        "requests": f"{status.waiting} waiting, {status.running} running, "
        f"{status.requests_finished} finished",
        "tokens": f"{status.tokens_committed} committed, {per_row:.2f} per row and step",
        "acceptance": f"{status.acceptance:.1%} of {status.draft_tokens} draft tokens",
        "batch spread": f"{status.batch_spread_mean:.1f} tokens on average",
    }
    table = _table("", "", header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _shards(status: pb.StatusResponse) -> Table:
    table = _table("shard", "up", "replicas", "waiting", "running", "tokens due", "tokens/s")
    for shard in status.shards:
        if shard.silent:
            table.add_row(shard.name, "silent")
            continue
        counts = (shard.serving, shard.waiting, shard.running, shard.outstanding_tokens)
        up, speed = f"{shard.uptime_s:.0f} s", f"{shard.tokens_per_s:.0f}"
        table.add_row(shard.name, up, *map(str, counts), speed)
    return table


def _replicas(status: pb.StatusResponse) -> Table:
    table = _table("replica", "rows", "batches", "KV free", "k", "step", "accepted")
    for each in status.replicas:
        of = each.cost_estimates
        table.add_row(
            each.id,
            str(each.residents),
            str(each.batches_in_flight),
            f"{each.kv_blocks_free / max(each.kv_blocks, 1):.0%} of {each.kv_blocks}",
            str(of.draft_len),
            f"{1000 * of.step_s:.1f} ms" if of.step_s else "-",
            f"{of.acceptance_greedy:.0%} / {of.acceptance_sampled:.0%}",
        )
    return table


def _kind(replica: pb.ReplicaStatus) -> str:
    parts = [f"{Path(replica.target).name}, {replica.dtype} on {replica.device}"]
    parts.append(" ".join(filter(None, ("drafter", replica.draft, replica.drafter or "none"))))
    parts.append(f"context {replica.context_len}")
    return "; ".join([*parts, *filter(None, [replica.arithmetic])])


def _table(*columns: str, header: bool = True) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=header)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if header and number else "left", no_wrap=header)
    return table
