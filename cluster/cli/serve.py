"""What `lockstep serve` and `lockstep status` do."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import grpc
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from cluster.client import Client
from cluster.client.channel import Server
from cluster.config import ClusterConfig
from protos import lockstep_pb2 as pb

if TYPE_CHECKING:
    from cluster.app import ClusterRun


def serve_until_signal(config: ClusterConfig) -> int:
    """Start the cluster and keep it up until SIGINT or SIGTERM. Returns the exit status.

    0 when the running requests could finish or the grace time had passed; 1 when a second signal
    ended them at once, or when the cluster did not start within `actors.start_s`.
    """
    from cluster import app, serve_app

    console = Console(stderr=True)
    told = threading.Event()

    def tell(_signal: int, _frame: FrameType | None) -> None:
        if told.is_set():
            raise KeyboardInterrupt
        told.set()

    cluster = app.ClusterRun(config)
    try:
        cluster.deploy(join_ray=True)
        # Ray sets handlers of its own while it starts.
        signal.signal(signal.SIGINT, tell)
        signal.signal(signal.SIGTERM, tell)
        late = _wait_until_ready(cluster, config, told)
        if late:
            console.print(f"The update is not complete: {late}", markup=False, soft_wrap=True)
        if not told.is_set():
            replicas = _number(cluster, config)
            console.print(
                f"Lockstep serves {config.replica.target} on {replicas} replica(s): "
                f"gRPC on port {config.server.grpc_port}, "
                f"HTTP on {config.server.http_host}:{config.server.http_port}. Ctrl-C stops it."
            )
        told.wait()
        console.print("Stopping: running requests may finish. A second Ctrl-C ends them.")
        cluster.stop()
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        console.print("Stopping at once.")
        cluster.stop(at_once=True)
        return 1 if told.is_set() else 0
    except serve_app.StartFailed as error:
        what = "The update failed, and what there is stays"
        if not cluster.updates:
            what = "Lockstep did not start"
            cluster.stop(at_once=True)  # nothing runs that could finish
        console.print(f"{what}: {error}", markup=False, soft_wrap=True)
        return 1
    except BaseException:
        cluster.stop()
        raise
    return 0


def _number(cluster: ClusterRun, config: ClusterConfig) -> str:
    if config.autoscaling is not None:
        return f"{config.replicas_min} to {config.replicas_max}"
    # The first has told the pool before Serve knows of it.
    up = max(1, cluster.replicas_up)
    return str(up) if up == config.replicas else f"{up} of {config.replicas}"


def _wait_until_ready(
    cluster: ClusterRun, config: ClusterConfig, told: threading.Event
) -> str | None:
    """Until the first replica is ready; if none is to be there, until the ingress is up.

    Returns early when told to stop. Raises StartFailed, also after `actors.start_s`; but returns
    what it says where an application is updated and there is who serves, old or new.
    """
    from cluster.serve_app import StartFailed

    with Client(f"localhost:{config.server.grpc_port}") as client:

        def done(all_up: bool) -> bool:
            if told.is_set():
                return True
            # A replica of the application that is updated would answer for those to come.
            needs_all = cluster.updates or not config.replicas_min
            return (all_up or not needs_all) and (not config.replicas_min or client.ready())

        try:
            cluster.wait_until(done, told.wait)
        except StartFailed as error:
            if not (cluster.updates and client.ready()):
                raise
            return str(error)
    return None


def print_status(server: Server, as_json: bool) -> int:
    """Ask the server and print what it says. Returns the exit status."""
    console = Console()
    try:
        with Client(server.address, server.api_key, server.tls) as client:
            status = client.status()
    except grpc.RpcError as error:
        Console(stderr=True).print(f"{server.address}: {error.code().name}: {error.details()}")
        return 1
    if as_json:
        print(
            MessageToJson(
                status,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
        )
        return 0
    console.print(_summary(status))
    if status.shards:
        console.print(_shards(status))
    console.print(_replicas(status))
    for arithmetic in dict.fromkeys(one.arithmetic for one in status.replicas if one.arithmetic):
        console.print(f"Arithmetic: {arithmetic}")
    return 0


def _summary(status: pb.StatusResponse) -> Table:
    table = Table(show_header=False, box=None)
    per_row = status.tokens_committed / status.row_steps if status.row_steps else 0.0
    rows = {
        "ready": "yes" if status.ready else "no, it is stopping" if status.stopping else "no",
        "pool": f"{status.pool_incarnation}, up {status.pool_uptime_s:.0f} s",
        "requests": f"{status.waiting} waiting, {status.running} running, "
        f"{status.requests_finished} finished",
        "tokens": f"{status.tokens_committed} committed, {per_row:.2f} per row and step",
        "acceptance": f"{status.acceptance:.1%} of {status.draft_tokens} draft tokens",
        "group spread": f"{status.group_spread_mean:.1f} tokens on average",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _shards(status: pb.StatusResponse) -> Table:
    table = Table("shard", "up", "replicas", "waiting", "running", "outstanding", "tokens/s")
    for shard in status.shards:
        if shard.silent:
            table.add_row(shard.name, "does not answer")
            continue
        table.add_row(
            f"{shard.name}, {shard.incarnation}",
            f"{shard.uptime_s:.0f} s",
            *(str(count) for count in (shard.serving, shard.waiting, shard.running)),
            f"{shard.outstanding_tokens} tokens",
            f"{shard.tokens_per_s:.0f}",
        )
    return table


def _draft_len(beliefs: pb.ReplicaBeliefs) -> str:
    trimmed = 0.0 < beliefs.verified < 1.0  # an older server says 0
    return f"{beliefs.draft_len}" + (f", {beliefs.verified:.0%} verified" if trimmed else "")


def _replicas(status: pb.StatusResponse) -> Table:
    table = Table(
        *("replica", "residents", "batches", "KV blocks free", "context", "model"),
        *("k", "step", "acceptance"),
    )
    for replica in status.replicas:
        model = Path(replica.target).name
        table.add_row(
            replica.id + (" (draining)" if replica.draining else ""),
            str(replica.residents),
            str(replica.orders_in_flight),
            f"{replica.kv_blocks_free} of {replica.kv_blocks}",
            str(replica.context_len),
            f"{model}, {replica.dtype} on {replica.device}"
            + (
                f", attention: {replica.attention}"
                if replica.attention not in ("", "gather")
                else ""
            ),
            _draft_len(replica.beliefs),
            f"{1000 * replica.beliefs.step_s:.1f} ms" if replica.beliefs.step_s else "?",
            f"{replica.beliefs.acceptance_greedy:.0%} greedy,"
            f" {replica.beliefs.acceptance_sampled:.0%} sampled",
        )
    return table
