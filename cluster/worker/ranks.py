"""The further ranks of a replica on several devices, as actors in the replica's placement group.

Ray reserves a bundle per rank, all of them or none, and Serve puts the replica itself into the
first one. The replica starts the others and leads them through torch's store (see
`replicas.parallel.rendezvous`); Ray places them, says whether they live, and ends them.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table

from cluster.pool.ray_pool import log_to_stderr
from cluster.worker.loading import tell_of_weights
from replicas.config import ReplicaConfig

CPUS_LEAST = 0.001
"""Of a bundle: Ray has none that reserves nothing."""


class RankProcess:
    """A further rank as the class of a Ray actor."""

    def follow(self, config: ReplicaConfig, rank: int, address: Any) -> None:
        """Returns when rank 0 has gone."""
        from replicas import parallel

        log_to_stderr()
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


def bundles(ranks: int, cpus: float, gpus: float) -> list[dict[str, float]]:
    """What a replica of so many ranks reserves; `cpus` and `gpus` are each rank's."""
    one = {"CPU": max(cpus, CPUS_LEAST)}
    if gpus:
        one["GPU"] = gpus
    return [dict(one) for _ in range(ranks)]
