"""What a replica asks of Ray and of its machine: GPUs, a placement group for its ranks, threads."""

from __future__ import annotations

import os
from typing import Any

import ray

from cluster.config import ClusterConfig
from cluster.worker.ranks import bundles
from replicas.config import ReplicaConfig


def gpus_of(config: ClusterConfig) -> float:
    """What a replica, or each of its ranks, asks of Ray: no two load onto one GPU by accident."""
    if config.actors.replica_gpus is not None:
        return config.actors.replica_gpus
    if config.replica.device != "auto":
        # With a GPU's number in the settings the user places the replicas.
        return 1.0 if config.replica.device == "cuda" else 0.0
    gpus = int(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0
    if not gpus:
        return 0.0
    if config.replica.tensor_parallel > 1:
        return 1.0
    # A share must fit on one GPU; Ray counts in steps of 1/10000.
    replicas_per_gpu = -(-config.replicas_max // gpus)
    return (10_000 // replicas_per_gpu) / 10_000


def placement(config: ClusterConfig, gpus: float) -> dict[str, Any]:
    """Serve's options for a replica of several ranks: a placement group for all of them."""
    ranks = config.replica.tensor_parallel
    if ranks == 1:
        return {}
    return {
        "placement_group_bundles": bundles(ranks, config.actors.replica_cpus, gpus),
        "placement_group_strategy": config.actors.ranks_strategy,
    }


def sharing_gpus(config: ClusterConfig, gpus: float) -> ClusterConfig:
    """The first of several replicas on one GPU must leave the others their part of its memory."""
    if not 0 < gpus < 1 or config.replica.gpu_share is not None:
        return config
    replica = config.replica.model_copy(update={"gpu_share": gpus})
    return config.model_copy(update={"replica": replica})


def replica_config(config: ClusterConfig) -> ReplicaConfig:
    """Replicas of one machine share its cores; Ray would give each of them a single thread."""
    replica = config.planned_replica
    if replica.torch_threads is not None:
        return replica
    processes = config.replicas_max * replica.tensor_parallel
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    return replica.model_copy(update={"torch_threads": threads})
