"""Which processes a running cluster has, as Ray knows them, and what the kernel says of each.

Must be called by a process that is connected to the cluster's Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("pool", "replica", "rank", "frontend", "proxy", "controller")


@dataclass(frozen=True)
class Process:
    """One process of the cluster."""

    kind: str
    """One of KINDS."""
    name: str
    """Of the actor, if it has one; a replica's holds Serve's id of it."""
    pid: int
    node_id: str


def cluster_processes(app_name: str = "lockstep") -> list[Process]:
    """The living processes of KINDS on this machine, by kind and name."""
    from ray._private.state import actors

    found = []
    for actor in actors(actor_state_name="ALIVE").values():
        kind = _kind(actor, app_name)
        # Where a process that Ray kills is gone before it has answered, Ray keeps it as alive.
        if kind is not None and actor["Pid"] and lives(actor["Pid"]):
            node_id = actor["Address"]["NodeID"]
            found.append(Process(kind, actor["Name"] or "", actor["Pid"], node_id))
    return sorted(found, key=lambda process: (process.kind, process.name))


def _kind(actor: dict[str, Any], app_name: str) -> str | None:
    name = actor["Name"] or ""
    if actor["ActorClassName"] == "PoolProcess":
        return "pool"
    if actor["ActorClassName"] == "RankProcess":
        return "rank"
    for kind in ("replica", "frontend"):
        if name.startswith(f"SERVE_REPLICA::{app_name}#{kind}#"):
            return kind
    if name.startswith("SERVE_PROXY_ACTOR"):
        return "proxy"
    return "controller" if name == "SERVE_CONTROLLER_ACTOR" else None


def lives(pid: int) -> bool:
    """Whether the process runs; one that has ended, and whose parent has not asked, does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"
