"""What a replica asks of Ray and of its machine: GPUs, threads, and further ranks as actors.

Of a replica on several devices Ray reserves a bundle per rank, all of them or none, and Serve puts
the replica itself into the first one. The replica starts the others and leads them through torch's
store (see `replicas.parallel.rendezvous`); Ray places them, says whether they live, and ends them.
"""

from __future__ import annotations

import math
import os
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table

from cluster.config import ClusterConfig, LogFormat
from cluster.metrics.log import log_to_stderr
from cluster.worker.loading import tell_of_weights
from replicas.config import ReplicaConfig

_CPUS_LEAST = 0.001
"""Of a bundle: Ray has none that reserves nothing."""


def gpus_of(config: ClusterConfig) -> float:
    """What a replica, or each of its ranks, asks of Ray: no two load onto one GPU by accident. A
    draft model with a GPU of its own has a whole one beside."""
    gpus, draft_device = _gpus_of_target(config), config.replica.drafting.draft_device
    apart = draft_device is not None and draft_device.startswith("cuda")
    return math.ceil(gpus) + 1.0 if gpus and apart else gpus


def _gpus_of_target(config: ClusterConfig) -> float:
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
    bundle = {"CPU": max(config.actors.replica_cpus, _CPUS_LEAST)}
    if gpus:
        bundle["GPU"] = gpus
    return {
        "placement_group_bundles": [bundle] * ranks,
        "placement_group_strategy": config.actors.ranks_strategy,
    }


def surging(config: ClusterConfig, gpus: float) -> ClusterConfig:
    """The settings with `actors.surge` decided. Where there is no place for one replica more, a new
    one would wait for ever beside those that it is to replace."""
    surge = config.actors.surge
    if surge is None:
        needs = {"GPU": gpus, "CPU": config.actors.replica_cpus}
        ranks = config.replica.tensor_parallel
        surge = _has_places(needs, ranks * (config.replicas_max + 1))
    actors = config.actors.model_copy(update={"surge": surge})
    return config.model_copy(update={"actors": actors})


def surge_percent(config: ClusterConfig) -> int:
    """Of Serve's: so many of the replicas more during a change; here one, as Serve rounds up."""
    return max(1, 100 // config.replicas_max) if config.actors.surge else 0


def frontends_surge_percent(config: ClusterConfig) -> int:
    """The same of the frontends: all at once."""
    needs = {"CPU": config.actors.frontend_cpus}
    return 100 if _has_places(needs, config.frontend.number + 1) else 0


def _has_places(needs: dict[str, float], number: int) -> bool:
    """Whether the nodes that Ray has now could hold so many processes with these needs; without a
    Ray, whether they need no GPU."""
    needs = {name: each for name, each in needs.items() if each > 0}
    if not ray.is_initialized():
        return "GPU" not in needs
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not needs:
        return True
    places = [min(int(has.get(name, 0) / each) for name, each in needs.items()) for has in found]
    return sum(places) >= number


def sharing_gpus(config: ClusterConfig, gpus: float) -> ClusterConfig:
    """The first of several replicas on one GPU must leave the others their part of its memory."""
    if not 0 < gpus < 1 or config.replica.gpu_memory_utilization is not None:
        return config
    replica = config.replica.model_copy(update={"gpu_memory_utilization": gpus})
    return config.model_copy(update={"replica": replica})


def replica_config(config: ClusterConfig) -> ReplicaConfig:
    """Replicas of one machine share its cores; Ray would give each of them a single thread."""
    replica = config.planned_replica
    if replica.torch_threads is not None:
        return replica
    processes = config.replicas_max * replica.tensor_parallel
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    return replica.model_copy(update={"torch_threads": threads})


# --------------------------------------------------------------------------- further ranks


class RankProcess:
    """A further rank as the class of a Ray actor."""

    def follow(self, config: ReplicaConfig, rank: int, address: Any, log_format: LogFormat) -> None:
        """Returns when rank 0 has gone."""
        from replicas import parallel

        log_to_stderr(log_format)
        tell_of_weights()
        parallel.follow(config, rank, address)


class RayRank:
    """That actor, as `replicas.parallel.ranks` ends it."""

    def __init__(self, actor: ActorHandle, life: ObjectRef) -> None:
        """`life` is what its `follow` returns."""
        self._actor = actor
        self._life = life

    def ended(self) -> str | None:
        if not ray.wait([self._life], timeout=0)[0]:
            return None
        try:
            ray.get(self._life, timeout=0)
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            return f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}"
        return "rank 0 has gone"

    def kill(self) -> None:
        # Without Ray the actor has ended too, and a call would start another Ray.
        if ray.is_initialized():
            ray.kill(self._actor)

    def leave(self, within_s: float) -> None:
        if ray.is_initialized():
            ray.wait([self._life], timeout=within_s)
            self.kill()


def host_of(group: PlacementGroup) -> str:
    """The address at which the ranks of a group reach this process; the loopback on one machine."""
    from replicas.parallel import LOOPBACK

    nodes = placement_group_table(group)["bundles_to_node_id"].values()
    return LOOPBACK if len(set(nodes)) == 1 else ray.util.get_node_ip_address()
