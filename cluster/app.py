"""The composition root: Serve's deployments, the actors of ranks, start and stop of a cluster.

`build` is what `serve run cluster.app:build target=...` and Serve config files name;
`ClusterRun` is the same for the command line. `cluster.pool.ray_pool` makes the pools' actors.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.actor import ActorHandle
from ray.serve import Application, RunTarget
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ReplicaRank
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.autoscaling import serve_autoscaling
from cluster.config import ClusterConfig
from cluster.config_sources import from_args
from cluster.frontend.grpc_api.api import GrpcApi
from cluster.frontend.http_api.app import http_app
from cluster.frontend.service import FrontendService
from cluster.frontend.target_text import TargetText
from cluster.garbage import collect_seldom
from cluster.metrics import FrontendMeter, ray_sink
from cluster.pool.protocol import silence_s
from cluster.pool.ray_pool import RayPool, log_to_stderr, open_pool, this_process
from cluster.pool.stopping import stop_pools
from cluster.serve_app import ServeApp, began_ray_here
from cluster.worker.loading import stage, tell_of_weights, up
from cluster.worker.ranks import RankProcess, RayRank, host_of
from cluster.worker.resources import gpus_of, placement, replica_config, sharing_gpus
from cluster.worker.worker import HostedReplica, Worker
from replicas.config import ReplicaConfig
from scheduler.scaling import shard_of_rank

APP_NAME = "lockstep"
SERVICER_FUNCTIONS = (
    "cluster.frontend.grpc_api.handlers.add_LockstepServicer_to_server",
    "cluster.frontend.grpc_api.handlers.add_HealthServicer_to_server",
)
"""What Serve's gRPC proxy must be told, by `start` or by a Serve config file."""

_REPLICA = "replica"
_ENVELOPE_BYTES_MAX = 1 << 20
"""What Serve sends along with a message between its own processes: pickled metadata."""
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
    return RayRank(actor, actor.follow.remote(config, rank, address))


def ray_pools(config: ClusterConfig) -> list[RayPool]:
    """One per shard."""
    return [RayPool(functools.partial(open_pool, config, name)) for name in config.pool_names]


# --------------------------------------------------------------------------- deployments


class ReplicaDeployment:
    """A replica as Serve starts, checks and drains it; its batches come from the pool."""

    async def __init__(self, config: ClusterConfig, load: LoadReplica) -> None:  # type: ignore[misc]
        log_to_stderr()
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

    def __init__(
        self,
        config: ClusterConfig,
        load_text: Callable[[ReplicaConfig], TargetText],
        replicas: DeploymentHandle,
    ) -> None:
        # The handle makes the replicas part of the application; requests do not go through it.
        del replicas
        log_to_stderr()
        service = FrontendService(
            config,
            ray_pools(config),
            load_text(config.replica),
            name=serve.get_replica_context().replica_id.unique_id,
            meter=FrontendMeter(ray_sink()),
        )
        super().__init__(service)
        service.start()

    def check_health(self) -> None:
        self.service.check()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return http_app(self.service)

    async def __del__(self) -> None:
        if hasattr(self, "service"):
            await self.close()


def build_app(
    config: ClusterConfig,
    load: LoadReplica = load_replica,
    load_text: Callable[[ReplicaConfig], TargetText] = TargetText.load,
) -> Application:
    """The application for a validated config; what a replica hosts can be replaced."""
    actors = config.actors
    quiet = {"enable_access_log": False}
    gpus = gpus_of(config)
    replicas = serve.deployment(
        ReplicaDeployment,
        name=_REPLICA,
        num_replicas=None if config.autoscaling else config.replicas,
        autoscaling_config=serve_autoscaling(config),
        ray_actor_options={"num_cpus": actors.replica_cpus, "num_gpus": gpus},
        **placement(config, gpus),
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.1,
        # A replica that is killed in the middle of a batch counts against the requests in it.
        graceful_shutdown_timeout_s=actors.drain_s + _LEAVE_S,
        logging_config=quiet,
    ).bind(sharing_gpus(config, gpus), load)
    return serve.deployment(
        serve.ingress()(FrontendDeployment),
        name="frontend",
        num_replicas=config.frontend.number,
        ray_actor_options={"num_cpus": actors.frontend_cpus},
        # More than the frontend admits: it refuses what it cannot serve, with the time to come
        # back, while Serve's proxy would let such calls wait without a bound.
        max_ongoing_requests=2 * config.frontend.requests_max,
        health_check_period_s=2,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=actors.drain_s + _LEAVE_S,
        logging_config=quiet,
    ).bind(config, load_text, replicas)


def build(args: Mapping[str, Any]) -> Application:
    """Application builder for Serve. Raises ConfigError, which names each wrong key."""
    return build_app(from_args(args))


# --------------------------------------------------------------------------- start and stop


def ray_environment(config: ClusterConfig) -> dict[str, str]:
    """Variables for the processes of a Ray that is begun for this cluster, on one machine."""
    transport_bytes = 4 * config.frontend.message_bytes_max
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default Ray's workers yield to every other process of the machine: beside one that is
        # always busy a replica of two threads took thirty times as long for a step.
        "RAY_worker_niceness": "0",
        # Torch's threads wait for one another awake for some 20 us, then asleep. Asleep at once a
        # pass takes up to half longer on an idle machine; awake for longer, several times as long
        # beside a busy process, where one spins away the time of the one that it waits for.
        "GOMP_SPINCOUNT": "1000",
        # Workers keep the jemalloc that Ray starts with: steps allocate and free all the time. With
        # it a chat model is 4 to 16 % faster, and less memory is left in pieces.
        "RAY_LD_PRELOAD_ON_WORKERS": "1",
        # The proxies' own limit; up to it the frontend says what is wrong, above it gRPC does.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(transport_bytes),
        # Three of these until a dead proxy is replaced; by default no client gets in for 30 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # From the proxy to the frontend by gRPC: there a chunk costs half of what it costs as an
        # object of Ray's. Such a call ends with the process, but not with its machine.
        "RAY_SERVE_PROXY_USE_GRPC": "1",
        # There whatever the proxy takes must pass, with what Serve puts around it.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(transport_bytes + _ENVELOPE_BYTES_MAX),
        # Serve's own counts; by default each of its replicas writes them ten times a second.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    }


class ClusterRun:
    """A cluster begun here; `stop` ends what was begun, and nothing of others."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._app = ServeApp(APP_NAME)
        self._connected = False
        self._began_ray = False
        self._began_serve = False
        self.updates = False
        """There was an application before, whose replicas serve until Serve stops them."""

    def start(self, app: Application | None = None, *, quiet: bool = False) -> None:
        """`deploy`, and return when all replicas are up. Raises StartFailed as `wait_until`."""
        self.deploy(app, quiet=quiet)
        self.wait_until(lambda all_up: all_up)

    def deploy(
        self, app: Application | None = None, *, quiet: bool = False, join_ray: bool = False
    ) -> None:
        """Start Ray, Serve and the application, and do not wait for the application.

        A Ray that this process is connected to is used. Else a new one is started; with `join_ray`
        only if none is found, through RAY_ADDRESS or on this machine.
        """
        if not ray.is_initialized():
            for name, value in ray_environment(self._config).items():
                os.environ.setdefault(name, value)
            ray.init(
                address=None if join_ray else "local",
                include_dashboard=False,
                log_to_driver=not quiet,
                logging_level=logging.ERROR if quiet else logging.INFO,
            )
            self._connected = True
            self._began_ray = began_ray_here()
        if quiet:
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
        before = serve.status()
        self._began_serve |= not (before.proxies or before.applications)
        self.updates = APP_NAME in before.applications
        server = self._config.server
        serve.start(
            proxy_location="EveryNode",
            http_options=HTTPOptions(host=server.http_host, port=server.http_port),
            grpc_options=gRPCOptions(
                port=server.grpc_port, grpc_servicer_functions=list(SERVICER_FUNCTIONS)
            ),
            logging_config={"enable_access_log": False},
        )
        # `serve.run` would wait for every replica, and without a bound.
        serve.run_many(
            [RunTarget(app or build_app(self._config), APP_NAME, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def wait_until(
        self, done: Callable[[bool], bool], sleep: Callable[[float], object] = time.sleep
    ) -> None:
        """Returns when `done` says so, which is told whether all replicas are up.

        Raises StartFailed when Serve gives up, and after `actors.start_s`.
        """
        self._app.wait_until(done, self._config.actors.start_s, sleep)

    @property
    def replicas_up(self) -> int:
        return self._app.replicas_up(_REPLICA)

    def stop(self, at_once: bool = False) -> None:
        """Let requests finish within the grace time, then stop the application and the pool.

        New requests are refused meanwhile; with `at_once` the running ones are cut, too, and
        replicas are killed. Serve and Ray are stopped if they were started here; a Ray that was
        joined is let go.
        """
        if not ray.is_initialized():
            return
        pools: list[ActorHandle] = []
        for name in self._config.pool_names:
            with contextlib.suppress(ValueError):
                pools.append(ray.get_actor(name, namespace=self._config.pool.namespace))
        grace_s = 0.0 if at_once else self._config.actors.drain_s
        stop_pools(pools, grace_s, silence_s(self._config.pool.beat_s))
        # A Ray that was begun here takes everything with it; one that was joined, nothing.
        if not (at_once and self._began_ray):
            # Before Serve as a whole: its proxies live on until the last answers are delivered.
            if at_once:
                self._app.delete_at_once()
            else:
                serve.delete(APP_NAME)
            if self._began_serve:
                serve.shutdown()
        for pool in pools:
            ray.kill(pool)
        if self._connected:
            ray.shutdown()
        self._connected = self._began_ray = self._began_serve = False
