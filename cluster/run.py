"""A cluster begun from this process: Ray, Serve, the application and the pools, and their stop.

How the application fares is what Serve's controller says of it. Whose the Ray below it is decides
what a stop ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import serve
from ray._private import worker
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
from ray.actor import ActorHandle
from ray.serve import Application, RunTarget
from ray.serve._private.client import ServeControllerClient
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus
from ray.util import list_named_actors

from cluster import own_ray
from cluster.app import LIMIT_PROXY, SERVICER_FUNCTIONS, build_app
from cluster.checks import check_files, check_on_nodes, check_ports
from cluster.config import ClusterConfig, ConfigError
from cluster.pool.protocol import NAMESPACE
from cluster.pool.ray_pool import stop_pools
from cluster.serve_view import (
    APP_NAME,
    REPLICA,
    application,
    is_final,
    one_line,
    raised,
    reports,
    up,
)

_LOOK_S = 0.25
"""Between two looks; each is work for Serve's controller."""
_DELETE_S = 10.0
"""For Serve to notice what was killed; it looks several times a second."""
_ENVELOPE_BYTES_MAX = 1 << 20
"""What Serve sends along with a message between its own processes: pickled metadata."""


Tell = Callable[[Mapping[str, Any]], None]
"""Takes what a process has logged: `ip`, `pid` and `lines`; called on a thread of Ray's."""


class StartFailed(RuntimeError):
    """The application did not come up; the message says why."""


def ray_environment(config: ClusterConfig) -> dict[str, str]:
    """Variables for the processes of a Ray that is begun for this cluster, on one machine."""
    transport_bytes = 4 * config.frontend.message_bytes_max
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Of Python: `python -c` in a worker or below it does not import from where it starts.
        "PYTHONSAFEPATH": "1",
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
        # gRPC's polling of sockets in place of its event engine: a batch costs the pool's process a
        # seventh less CPU time, and two small replicas on two cores are up to 3 % faster.
        "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
        # The proxies' own limit, of requests and of answers; up to it the frontend says what is
        # wrong, above it gRPC does.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(transport_bytes),
        # Called in each proxy: limits of headers and of gRPC's streams, which Serve does not have,
        # and headers that it cannot decode, which would be an error of the server.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": LIMIT_PROXY,
        # Three of these until a dead proxy is replaced; by default no client gets in for 30 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # From the proxy to the frontend by gRPC: there a chunk costs half of what it costs as an
        # object of Ray's. Such a call ends with the process, but not with its machine.
        "RAY_SERVE_PROXY_USE_GRPC": "1",
        # There whatever the proxy takes must pass, with what Serve puts around it.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(transport_bytes + _ENVELOPE_BYTES_MAX),
        # How soon a node that is lost counts as dead, so that a pool of it starts elsewhere: five
        # missed checks in a row, one a second, each of up to 3 s. By default that takes 15 s after
        # the end of a node's processes, and 65 s where a machine goes dark.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "3000",
        # Serve's own counts; by default each of its replicas writes them ten times a second.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    }


class ClusterRun:
    """A cluster begun here; `stop` ends what was begun, and nothing of others."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._connected = False
        self._began_ray = False
        self._began_serve = False
        self._deployed = False
        """Whether the application is of this run."""
        self.updates = False
        """There was an application before, whose replicas serve until Serve stops them."""

    def start(self, app: Application | None = None, *, quiet: bool = False) -> None:
        """`deploy`, and return when all replicas are up. Raises StartFailed as `wait_until`."""
        self.deploy(app, tell=(lambda logged: None) if quiet else None)
        self.wait_until(lambda all_up: all_up)

    def deploy(
        self,
        app: Application | None = None,
        *,
        tell: Tell | None = None,
        join_ray: bool = False,
        replace: bool = False,
    ) -> None:
        """Start Ray, Serve and the application, and do not wait for the application.

        Raises StartFailed, before anything that runs is touched, where a port is taken, a model is
        not there, or another run's application is and `replace` does not say that it may go.

        A Ray that this process is connected to is used. Else a new one is started; with `join_ray`
        only if none is found, through RAY_ADDRESS or on this machine. What its processes log goes
        to `tell` in place of this one's output.
        """
        if not ray.is_initialized():
            for name, value in ray_environment(self._config).items():
                os.environ.setdefault(name, value)
            try:
                joins = join_ray and own_ray.is_there()
                if not joins:
                    check_files(self._config)
                    check_ports(self._config)
                connect = own_ray.join if joins else own_ray.begin
                connect(
                    include_dashboard=False,
                    logging_level=logging.INFO if tell is None else logging.ERROR,
                )
            except (ConfigError, OSError) as error:
                raise StartFailed(str(error)) from error
            worker._worker_logs_enabled = tell is None
            if tell is not None:
                # The name is that of Ray's own, by which `ray.shutdown` takes it away.
                dispatcher.add_handler("ray_print_logs", tell)
            self._connected = True
            self._began_ray = _began_ray_here()
        if tell is not None:
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
        before = serve.status()
        self._began_serve |= not (before.proxies or before.applications)
        self.updates = APP_NAME in before.applications
        self._check_what_runs(bool(before.proxies), replace)
        server = self._config.server
        serve.start(
            proxy_location="EveryNode",
            http_options=HTTPOptions(host=server.http_host, port=server.http_port),
            grpc_options=gRPCOptions(
                port=server.grpc_port, grpc_servicer_functions=list(SERVICER_FUNCTIONS)
            ),
            logging_config={"enable_access_log": False},
        )
        self._deployed = True
        # `serve.run` would wait for every replica, and without a bound.
        serve.run_many(
            [RunTarget(app or build_app(self._config), APP_NAME, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _check_what_runs(self, serving: bool, replace: bool) -> None:
        """Raises StartFailed."""
        if self.updates and not (self._deployed or replace):
            raise StartFailed(
                "this Ray serves the application already, which was left unchanged. --replace"
                " replaces it; the application then ends with this command"
            )
        try:
            if serving:
                _check_ports_of(_get_global_client(), self._config)
            elif not self._began_ray:
                check_ports(self._config)
            if self.updates:
                check_on_nodes(self._config)
        except ConfigError as error:
            raise StartFailed(str(error)) from error

    def wait_until(
        self, done: Callable[[bool], bool], sleep: Callable[[float], object] = time.sleep
    ) -> None:
        """Returns when `done` says so, which is told whether all replicas are up.

        Raises StartFailed when Serve gives up, and after `actors.start_s`.
        """
        bound_s = self._config.actors.start_s
        deadline_s = time.monotonic() + bound_s
        while not done(_is_running()):
            if time.monotonic() > deadline_s:
                late = f"not up within {bound_s:g} s (actors.start_s)"
                raise StartFailed("; ".join([late, *reports(application())]))
            sleep(_LOOK_S)

    @property
    def replicas_up(self) -> int:
        running = application()
        found = running.deployments.get(REPLICA) if running else None
        return up(found) if found else 0

    def stop(self, at_once: bool = False) -> None:
        """Let requests finish within the grace time, then stop the application and the pool.

        New requests are refused meanwhile; with `at_once` the running ones are cut, too, and
        replicas are killed. Serve and Ray are stopped if they were started here; a Ray that was
        joined is let go.
        """
        if not ray.is_initialized():
            return
        pools: list[ActorHandle] = []
        for name in self._config.pool_names if self._deployed else ():
            with contextlib.suppress(ValueError):
                pools.append(ray.get_actor(name, namespace=NAMESPACE))
        grace_s = 0.0 if at_once else self._config.actors.drain_s
        stop_pools(pools, grace_s)
        # A Ray that was begun here takes everything with it; one that was joined, nothing.
        if not (at_once and self._began_ray):
            # Before Serve as a whole: its proxies live on until the last answers are delivered.
            if self._deployed and application() is not None:
                serve.delete(APP_NAME, _blocking=not at_once)
            if at_once and self._deployed:
                _kill_replicas()
            if self._began_serve:
                serve.shutdown()
        for pool in pools:
            ray.kill(pool)
        if self._connected:
            ray.shutdown()
        self._connected = self._began_ray = self._began_serve = self._deployed = False


def _began_ray_here() -> bool:
    """Whether this process has begun the Ray that it is connected to; False if it was joined.

    `ray.init` does not say which of the two it did. `ray.shutdown` decides by the same node what
    it ends; a Ray client (`ray://`) has none.
    """
    node = worker._global_node
    return node is not None and bool(node.is_head())


# --------------------------------------------------------------------------- what Serve says


def _kill_replicas() -> None:
    """Kill those of the application that is deleted: Serve lets each drain first, also one that
    still loads. After ten seconds the rest is left to Serve."""
    deadline_s = time.monotonic() + _DELETE_S
    while (found := application()) and time.monotonic() < deadline_s:
        # Before that Serve would replace them.
        if found.status == ApplicationStatus.DELETING:
            for actor in list_named_actors(all_namespaces=True):
                if actor["name"].startswith(f"SERVE_REPLICA::{APP_NAME}#"):
                    # It may have ended by itself.
                    with contextlib.suppress(ValueError):
                        ray.kill(ray.get_actor(**actor))
        time.sleep(_LOOK_S)


def _is_running() -> bool:
    found = application()
    if found is None:
        raise StartFailed("the application was deleted while it started")
    errors = raised(found)
    if found.status == ApplicationStatus.DEPLOY_FAILED:
        # Serve itself says which deployments failed, and not why.
        raise StartFailed("; ".join(errors or [one_line(found.message)]))
    if found.status == ApplicationStatus.DEPLOYING and any(map(is_final, errors)):
        # Serve would try again, and again.
        raise StartFailed("; ".join(filter(is_final, errors)))
    return bool(found.status == ApplicationStatus.RUNNING)


def _check_ports_of(serving: ServeControllerClient, config: ClusterConfig) -> None:
    """Raises StartFailed where Serve, which runs already, listens elsewhere: that is for all of its
    applications, and stays."""
    http, grpc, ours = serving.http_config, serving.grpc_config, config.server
    if (http.port, grpc.port) != (ours.http_port, ours.grpc_port):
        raise StartFailed(
            f"Serve runs there already, with HTTP on port {http.port} and gRPC on port {grpc.port};"
            " give these by --http-port and --grpc-port"
        )
