"""The further ranks of a replica on several devices, as actors in the replica's placement group.

Ray reserves a bundle per rank, all of them or none, and Serve puts the replica itself into the
first one. The replica starts the others and leads them over its own connections (see
`replicas.meeting`); Ray is needed to place, to watch and to end them.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.ray_pool import log_to_stderr
from replicas.config import ReplicaConfig

CPUS_LEAST = 0.001
"""Of a bundle: Ray has none that reserves nothing."""


class RankProcess:
    """A further rank as the class of a Ray actor."""

    def follow(self, config: ReplicaConfig, rank: int, address: Any) -> None:
        """Returns when rank 0 has gone."""
        from replicas import parallel

        log_to_stderr()
        parallel.follow(config, rank, address)


class RayRank:
    """That actor, as `replicas.ranks` ends it."""

    def __init__(self, actor: ActorHandle, life: ObjectRef) -> None:
        """`life` is what its `follow` returns."""
        self._actor = actor
        self._life = life

    def ended(self) -> str | None:
        if not ray.wait([self._life], timeout=0)[0]:
            return None
        try:
            ray.get(self._life, timeout=0)
        except (RayError, OSError) as error:
            return str(error)
        return "rank 0 has gone"

    def kill(self) -> None:
        ray.kill(self._actor)

    def leave(self, within_s: float) -> None:
        ray.wait([self._life], timeout=within_s)
        self.kill()


def bundles(ranks: int, cpus: float, gpus: float) -> list[dict[str, float]]:
    """What a replica of so many ranks reserves; `cpus` and `gpus` are each rank's."""
    one = {"CPU": max(cpus, CPUS_LEAST)}
    if gpus:
        one["GPU"] = gpus
    return [dict(one) for _ in range(ranks)]
