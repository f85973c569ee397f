"""What `lockstep serve` and `lockstep status` do."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType

import grpc
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from cluster.client import Client
from cluster.config import ClusterConfig
from protos import lockstep_pb2 as pb


def serve_until_signal(config: ClusterConfig) -> int:
    """Start the cluster and keep it up until SIGINT or SIGTERM. Returns the exit status."""
    from cluster import app

    console = Console(stderr=True)
    told = threading.Event()

    def tell(_signal: int, _frame: FrameType | None) -> None:
        told.set()

    cluster = app.ClusterRun(config)
    try:
        cluster.start(join_ray=True)
        # Ray sets handlers of its own while it starts.
        signal.signal(signal.SIGINT, tell)
        signal.signal(signal.SIGTERM, tell)
        with Client(f"localhost:{config.server.grpc_port}") as client:
            client.wait_until_ready(config.actors.start_s)
        console.print(
            f"Lockstep serves {config.replica.target} on {config.replicas} replica(s): "
            f"gRPC on port {config.server.grpc_port}, "
            f"HTTP on {config.server.http_host}:{config.server.http_port}. Ctrl-C stops it."
        )
        told.wait()
        console.print("Stopping: running requests may finish.")
    except KeyboardInterrupt:
        console.print("Stopping.")
    finally:
        cluster.stop()
    return 0


def print_status(address: str, as_json: bool) -> int:
    """Ask the server at `address` and print what it says. Returns the exit status."""
    console = Console()
    try:
        with Client(address) as client:
            status = client.status()
    except grpc.RpcError as error:
        Console(stderr=True).print(f"{address}: {error.code().name}: {error.details()}")
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
    console.print(_replicas(status))
    return 0


def _summary(status: pb.StatusResponse) -> Table:
    table = Table(show_header=False, box=None)
    per_row = status.tokens_committed / status.row_steps if status.row_steps else 0.0
    rows = {
        "ready": "yes" if status.ready else "no",
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


def _replicas(status: pb.StatusResponse) -> Table:
    table = Table("replica", "residents", "orders", "KV blocks free", "context", "model")
    for replica in status.replicas:
        model = Path(replica.target).name
        table.add_row(
            replica.id + (" (draining)" if replica.draining else ""),
            str(replica.residents),
            str(replica.orders_in_flight),
            f"{replica.kv_blocks_free} of {replica.kv_blocks}",
            str(replica.context_len),
            f"{model}, {replica.dtype} on {replica.device}",
        )
    return table
