"""The cluster of a `HostedCluster`, in the process that is connected to its Ray."""

from __future__ import annotations

import os
import time
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.serve import RunTarget
from ray.serve._private.common import DeploymentID
from ray.serve.config import HTTPOptions, gRPCOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from benchmarks.shared.processes import Process, cluster_processes
from cluster import app, run
from cluster.frontend.target_text import TargetText
from cluster.pool.protocol import NAMESPACE
from cluster.pool.ray_pool import PoolProcess
from cluster.serve_view import APP_NAME
from tests.chaos.hosted import START_S, Plan

_RAY_S = 100.0
"""For Ray's answer within a call: a call that ended without its own would leave it to the next."""
_WORKER = "worker"
"""A resource that all nodes but the head have."""


class Held:
    """Its methods are what the other process may ask for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._nodes: Any = None
        """The cluster of nodes, where the plan has more than one."""

    def start(self) -> None:
        plan, server = self._plan, self._plan.config.server
        environment = run.ray_environment(plan.config)
        if plan.worker_nodes:
            # As where `ClusterRun` joins a Ray.
            del environment["RAY_SERVE_PROXY_USE_GRPC"]
        os.environ.update(environment)
        options = {"include_dashboard": False, "object_store_memory": 100 << 20}
        quiet = {"log_to_driver": False, "configure_logging": False}
        if plan.worker_nodes:
            head = {"num_cpus": plan.cpus, **options}
            self._nodes = Cluster(initialize_head=True, head_node_args=head)
            for _ in range(plan.worker_nodes):
                self.add_node()
            ray.init(self._nodes.address, **quiet)
        else:
            ray.init("local", num_cpus=plan.cpus, **quiet, **options)
        if plan.pool_on_worker or plan.pool is not None:
            self._open_pool()
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host=server.http_host, port=server.http_port),
            grpc_options=gRPCOptions(
                port=server.grpc_port, grpc_servicer_functions=list(app.SERVICER_FUNCTIONS)
            ),
            logging_config={"enable_access_log": False},
        )
        if plan.declared is None:
            self.deploy(plan)
        else:
            self.declare(plan.declared)

    def declare(self, data: dict[str, Any]) -> None:
        """What `serve deploy` does behind the dashboard; returns before anything is built."""
        schema = ServeDeploySchema.model_validate(data)
        _get_global_client().deploy_apps(schema, _blocking=False)

    def state(self) -> tuple[str, str, dict[str, dict[str, int]]]:
        """What Serve says of the application, why, and how many replicas of each deployment are in
        which state."""
        found = serve.status().applications[APP_NAME]
        states = {
            name: dict(deployment.replica_states) for name, deployment in found.deployments.items()
        }
        said = [found.message, *(deployment.message for deployment in found.deployments.values())]
        return found.status.value, " ".join(said), states

    def deploy(self, plan: Plan) -> None:
        """Returns when Serve says that it is done."""
        self.change(plan, wait=True)

    def change(self, plan: Plan, wait: bool = False) -> None:
        load, load_text = plan.load or app.load_replica, plan.load_text or TargetText.load
        application = app.build_app(plan.config, load, load_text)
        # As `ClusterRun` does it, but so that replicas can be told to come and go one by one.
        external = plan.config.autoscaling is None
        serve.run_many(
            [RunTarget(application, APP_NAME, "/", external_scaler_enabled=external)],
            wait_for_ingress_deployment_creation=wait,
            wait_for_applications_running=wait,
        )

    def _open_pool(self) -> None:
        config = self._plan.config
        # Any worker will do, also when it restarts; a wish for a certain node is lost at times.
        resources = {_WORKER: 0.001} if self._plan.pool_on_worker else {}
        pool = (
            ray.remote(self._plan.pool or PoolProcess)
            .options(
                name=config.pool_name,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=0,
                resources=resources,
            )
            .remote(config)
        )
        ray.get(pool.status.remote(), timeout=START_S)

    def ray_address(self) -> str:
        address: str = ray.get_runtime_context().gcs_address
        return address

    def processes(self) -> list[Process]:
        return cluster_processes()

    def scale(self, replicas: int) -> None:
        controller = _get_global_client()._controller
        deployment = DeploymentID("replica", APP_NAME)
        ray.get(controller.update_deployment_replicas.remote(deployment, replicas), timeout=_RAY_S)

    def add_node(self) -> None:
        self._nodes.add_node(
            num_cpus=1, num_gpus=1, resources={_WORKER: 1.0}, object_store_memory=100 << 20
        )

    def lose_node(self, node_id: str) -> None:
        (node,) = (node for node in self._nodes.worker_nodes if node.node_id == node_id)
        self._nodes.remove_node(node, allow_graceful=False)

    def drain_node(self, node_id: str, notice_s: float) -> None:
        client = ray._raylet.GcsClient(address=self._nodes.address)
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + notice_s) * 1000)
        accepted, why = client.drain_node(node_id, reason, "a test", deadline_ms)
        assert accepted, why

    def stop(self) -> None:
        try:
            if ray.is_initialized():
                serve.shutdown()
        finally:
            ray.shutdown()
            if self._nodes is not None:
                self._nodes.shutdown()
