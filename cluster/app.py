"""The composition root: Serve's deployments and the actors of ranks.

`build` is what `serve run cluster.app:build replica.target=...` and Serve config files name;
`cluster.run` is the same for the command line. `cluster.pool.ray_pool` makes the pools' actors.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray._private import worker
from ray.serve import Application
from ray.serve._private.constants import RAY_SERVE_GRPC_MAX_MESSAGE_SIZE
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ReplicaRank
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster import serve_view
from cluster.autoscaling import serve_autoscaling
from cluster.checks import check_on_nodes
from cluster.config import ClusterConfig
from cluster.config_sources import from_args
from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.http_api.app import http_app
from cluster.frontend.proxy.pacing import PacedAnswers
from cluster.frontend.service import FrontendService
from cluster.frontend.target_text import TargetText
from cluster.metrics import FrontendMeter
from cluster.metrics.log import form_here, log_to_stderr
from cluster.metrics.ray_sink import ray_sink
from cluster.pool.ray_pool import RayPool, collect_seldom, open_pool, this_process
from cluster.serve_view import FRONTEND, REPLICA
from cluster.worker.hosted import HostedReplica
from cluster.worker.loading import stage, tell_of_weights, up
from cluster.worker.resources import (
    RankProcess,
    RayRank,
    frontends_surge_percent,
    gpus_of,
    host_of,
    placement,
    replica_config,
    sharing_gpus,
    surge_percent,
    surging,
)
from cluster.worker.worker import Worker
from replicas.config import ReplicaConfig
from scheduler.scaling import shard_of_rank

SERVICER_FUNCTIONS = (
    "cluster.frontend.grpc_api.handlers.add_LockstepServicer_to_server",
    "cluster.frontend.grpc_api.handlers.add_HealthServicer_to_server",
    "cluster.frontend.proxy.limits.limit_http",
)
"""What Serve's gRPC proxy must be told, by `start` or by a Serve config file."""
LIMIT_PROXY = "cluster.frontend.proxy.limits.limit_proxy"
"""What Serve's proxies must call, by a variable of the environment where Ray starts."""

_LOOK_S = 0.1
_LEAVE_S = 2.0
"""What a replica may take to leave the pool once its grace is over, and a frontend to tell its
clients that it is."""

LoadReplica = Callable[[ReplicaConfig], HostedReplica]


def load_replica(config: ReplicaConfig) -> HostedReplica:
    """The real thing; torch is imported in the replica's process only.

    Where the replica has a placement group its further ranks are actors there.
    """
    from replicas import parallel

    stage(f"loads {config.target}")
    tell_of_weights()
    group = get_current_placement_group()
    if config.tensor_parallel == 1 or group is None:
        return parallel.load_replica(config)
    start = functools.partial(_start_rank, group)
    return parallel.load_parallel(config, start, host_of(group))


def _start_rank(group: PlacementGroup, config: ReplicaConfig, rank: int, address: Any) -> RayRank:
    bundle = group.bundle_specs[rank]
    actor = (
        ray.remote(RankProcess)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        )
        .remote()
    )
    return RayRank(actor, actor.follow.remote(config, rank, address, form_here()))


def ray_pools(config: ClusterConfig) -> list[RayPool]:
    """One per shard."""
    return [RayPool(functools.partial(open_pool, config, name)) for name in config.pool_names]


# --------------------------------------------------------------------------- deployments


class ReplicaDeployment:
    """A replica as Serve starts, checks and drains it; its batches come from the pool."""

    async def __init__(self, config: ClusterConfig, load: LoadReplica) -> None:  # type: ignore[misc]
        log_to_stderr(config.server.log_format)
        stage("starts its process")
        own = replica_config(config)
        context = serve.get_replica_context()
        self._shards = config.pool.shards
        self._worker = Worker(
            config,
            lambda: load(own),
            ray_pools(config),
            name=context.replica_id.unique_id,
            process=this_process(),
            shard=shard_of_rank(context.rank.rank, self._shards),
        )
        spec = await self._worker.start()
        up(spec.drafter)
        # A look at all that torch and the models brought along would hold up a step for 0.2 s.
        collect_seldom()

    def reconfigure(self, _user_config: None, rank: ReplicaRank) -> None:
        """Serve keeps the ranks without gaps, and calls this when ours changes."""
        self._worker.move_to(shard_of_rank(rank.rank, self._shards))

    def check_health(self) -> None:
        self._worker.check()

    async def __del__(self) -> None:
        if hasattr(self, "_worker"):
            await self._worker.close()


class FrontendDeployment(GrpcApi):
    """The frontend as Serve starts it; gRPC methods by their names, HTTP by the ASGI app."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ClusterConfig,
        load_text: Callable[[ReplicaConfig], TargetText],
        replicas: DeploymentHandle,
    ) -> None:
        # The handle makes the replicas part of the application; requests do not go through it.
        del replicas
        log_to_stderr(config.server.log_format)
        service = FrontendService(
            config,
            ray_pools(config),
            load_text(config.replica),
            name=serve.get_replica_context().replica_id.unique_id,
            meter=FrontendMeter(ray_sink(config.model_name)),
            why_no_replica=_why_no_replica,
        )
        super().__init__(service, RAY_SERVE_GRPC_MAX_MESSAGE_SIZE)
        service.start()
        await _wait_for_replicas(service)
        self._leaving = asyncio.create_task(_leave_in_time(service, config.actors.drain_s))

    def check_health(self) -> None:
        self.service.check()

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = http_app(self.service)
        app.add_middleware(PacedAnswers)
        return app

    async def __del__(self) -> None:
        if hasattr(self, "service"):
            await self.close()


async def _why_no_replica() -> tuple[str, bool]:
    return await asyncio.to_thread(serve_view.why_no_replica)


async def _wait_for_replicas(service: FrontendService) -> None:
    """Until replicas serve in the pool of this frontend, or no other frontend does meanwhile: Serve
    ends the old ones as soon as this one is up.

    Raises RuntimeError after `actors.start_s`, so that the old ones go on.
    """
    bound_s = service.config.actors.start_s
    deadline_s = time.monotonic() + bound_s
    while not service.ready() and await asyncio.to_thread(serve_view.frontends_up):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"no replica within {bound_s:g} s (actors.start_s)")
        await asyncio.sleep(_LOOK_S)


async def _leave_in_time(service: FrontendService, grace_s: float) -> None:
    """End the calls that last too long once Serve ends this frontend, before it kills it. Serve
    itself says so only when none is left."""
    replica = worker.global_worker.actors[worker.global_worker.actor_id]._replica_impl
    while not replica._shutting_down:
        await asyncio.sleep(_LOOK_S)
    await service.leave(grace_s)


def build_app(
    config: ClusterConfig,
    load: LoadReplica = load_replica,
    load_text: Callable[[ReplicaConfig], TargetText] = TargetText.load,
) -> Application:
    """The application for a validated config; what a replica hosts can be replaced."""
    logs: dict[str, Any] = {"enable_access_log": False}
    if config.server.log_format == "json":
        logs["encoding"] = "JSON"
    gpus = gpus_of(config)
    config = surging(config, gpus)
    actors = config.actors
    replicas = serve.deployment(
        ReplicaDeployment,
        name=REPLICA,
        num_replicas=None if config.autoscaling else config.replicas,
        autoscaling_config=serve_autoscaling(config),
        ray_actor_options={"num_cpus": actors.replica_cpus, "num_gpus": gpus},
        **placement(config, gpus),
        health_check_period_s=2,
        health_check_timeout_s=10,
        max_surge_percent=surge_percent(config),
        graceful_shutdown_wait_loop_s=0.1,
        # A replica that is killed in the middle of a batch counts against the requests in it.
        graceful_shutdown_timeout_s=actors.drain_s + _LEAVE_S,
        logging_config=logs,
    ).bind(sharing_gpus(config, gpus), load)
    return serve.deployment(
        serve.ingress()(FrontendDeployment),
        name=FRONTEND,
        num_replicas=config.frontend.number,
        max_surge_percent=frontends_surge_percent(config),
        ray_actor_options={"num_cpus": actors.frontend_cpus},
        # More than the frontend admits: it refuses what it cannot serve, with the time to come
        # back, while Serve's proxy would let such calls wait without a bound.
        max_ongoing_requests=2 * config.frontend.requests_max,
        health_check_period_s=2,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=actors.drain_s + _LEAVE_S,
        logging_config=logs,
    ).bind(config, load_text, replicas)


def build(args: Mapping[str, Any]) -> Application:
    """Application builder for Serve, which keeps the old application until this returns. Raises
    ConfigError, which names each wrong key or says what no node could serve."""
    config = from_args(args)
    if ray.is_initialized():
        check_on_nodes(config)
    return build_app(config)
