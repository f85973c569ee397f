"""What the page of operators shows, as JSON: figures and ids, no text and no token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from cluster.config import ClusterConfig
from cluster.metrics import METRICS, Sum, gauges
from cluster.pool.protocol import PoolOverview, merged_view
from scheduler.status import ReplicaStatus

_HISTOGRAMS = {
    "first_token_s": "lockstep_first_token_seconds",
    "token_s": "lockstep_token_seconds",
}
"""What the page calls them."""


def dashboard_data(
    shards: Mapping[int, PoolOverview], config: ClusterConfig, chat: bool
) -> dict[str, Any]:
    """`shards`: those that have answered, by their numbers, at least one; `chat`: whether the
    target has a template for conversations."""
    names = config.pool_names
    silent = [name for number, name in enumerate(names) if number not in shards]
    view = merged_view([seen.view for seen in shards.values()], silent)
    status, shown = view.status, gauges(view.status)
    sums = [each for seen in shards.values() for each in seen.sums]
    batches = [batch for seen in shards.values() for batch in reversed(seen.batches)]
    requests = [request for seen in shards.values() for request in seen.requests]
    return {
        "model": config.model_name,
        "chat": chat,
        "uptime_s": view.uptime_s,
        "stopping": view.stopping,
        "silent": silent,
        "tokens_per_s": status.tokens_per_s,
        "waiting": status.waiting,
        "running": status.live - status.waiting,
        "serving": status.serving,
        "acceptance": shown["lockstep_acceptance"],
        "kv_usage": shown["lockstep_kv_usage"],
        "drafts": sum(each.value for each in sums if each.name == "lockstep_drafts"),
        "accepted_at": _accepted_at(sums),
        "histograms": {name: _histogram(metric, sums) for name, metric in _HISTOGRAMS.items()},
        "replicas": [_replica(replica) for replica in status.replicas],
        "batches": [asdict(batch) for batch in batches],
        "requests": [asdict(request) for request in requests],
    }


def _accepted_at(sums: Iterable[Sum]) -> list[float]:
    """Accepted tokens by their position in the draft."""
    found: dict[int, float] = {}
    for each in sums:
        if each.name == "lockstep_accepted_tokens_at":
            position = int(each.tags[0])
            found[position] = found.get(position, 0.0) + each.value
    return [found.get(position, 0.0) for position in range(max(found, default=-1) + 1)]


def _histogram(name: str, sums: Iterable[Sum]) -> dict[str, Any]:
    bounds = METRICS[name].bounds
    buckets = [0] * (len(bounds) + 1)
    for each in sums:
        if each.name == name:
            buckets = [ours + theirs for ours, theirs in zip(buckets, each.buckets, strict=True)]
    return {"bounds": bounds, "buckets": buckets}


def _replica(replica: ReplicaStatus) -> dict[str, Any]:
    figures = replica.figures
    return {
        "id": replica.id,
        "draining": replica.draining,
        "device": replica.spec.device,
        "drafter": replica.spec.drafter,
        "residents": replica.residents,
        "batches_in_flight": replica.batches_in_flight,
        "kv_blocks": replica.spec.kv_blocks,
        "kv_blocks_used": replica.kv_blocks_used,
        "acceptance": figures.acceptance,
        "tokens_per_s": figures.committed_tokens / figures.busy_s if figures.busy_s else 0.0,
    }
