"""A cluster of fake replicas in a process of its own, with a driver that obeys commands.

So it shares no Ray with the other integration tests, and its number of replicas, its settings and
its version can change while requests run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client.retry import is_repeatable
from cluster.config import ClusterConfig
from protos import lockstep_pb2 as pb
from protos import lockstep_pb2_grpc
from tests.cluster.fakes import fake_loader, load_fake_text

START_S = 240.0
COMMAND_S = 240.0
ANSWER_S = 180.0


def drive(pipe: Connection, config: ClusterConfig, step_s: float) -> None:
    """The driver: starts Ray and Serve, then does as it is told until it hears "stop"."""
    import ray
    from ray import serve
    from ray.serve._private.common import DeploymentID
    from ray.serve.config import HTTPOptions, gRPCOptions

    from cluster.app import APP_NAME, SERVICER_FUNCTIONS, build_app, ray_environment

    def deploy(config: ClusterConfig) -> None:
        app = build_app(config, load=fake_loader(step_s), load_text=load_fake_text)
        # Without autoscaling the number of replicas is set from outside, as over Serve's REST API.
        external = config.autoscaling is None
        serve.run(app, name=APP_NAME, route_prefix="/", external_scaler_enabled=external)

    def scale(number: int) -> None:
        from ray.serve.context import _get_global_client

        controller = _get_global_client()._controller
        ray.get(
            controller.update_deployment_replicas.remote(DeploymentID("replica", APP_NAME), number),
            timeout=COMMAND_S,
        )

    os.environ.update(ray_environment(config))
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host="127.0.0.1", port=config.server.http_port),
            grpc_options=gRPCOptions(
                port=config.server.grpc_port, grpc_servicer_functions=list(SERVICER_FUNCTIONS)
            ),
            logging_config={"enable_access_log": False},
        )
        pipe.send(None)
        while True:
            name, argument = pipe.recv()
            if name == "stop":
                break
            try:
                {"deploy": deploy, "scale": scale}[name](argument)
                pipe.send(None)
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")
    except EOFError:
        pass
    finally:
        serve.shutdown()
        ray.shutdown()


class ElasticCluster:
    """Commands to the driver, and plain gRPC to the cluster: no client library that would retry."""

    def __init__(self, config: ClusterConfig, step_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._driver = context.Process(target=drive, args=(theirs, config, step_s), daemon=True)
        self._driver.start()
        theirs.close()
        self.address = f"localhost:{config.server.grpc_port}"
        try:
            self._answer(START_S)
        except BaseException:
            self._driver.kill()
            raise
        self._channel = grpc.insecure_channel(self.address)
        self._stub = lockstep_pb2_grpc.LockstepStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def deploy(self, config: ClusterConfig) -> None:
        """Deploy, or update what is deployed; returns when Serve says that it is done."""
        self._tell("deploy", config)

    def scale(self, number: int) -> None:
        """Ask Serve for so many replicas; returns at once."""
        self._tell("scale", number)

    def status(self) -> pb.StatusResponse:
        """Asks until the pool answers: on a busy machine it may start for longer than a call of its
        frontend waits for it."""
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            try:
                return self._stub.Status(pb.StatusRequest(), timeout=60)
            except grpc.RpcError as error:
                if time.monotonic() > deadline_s or not is_repeatable(error):
                    raise
            time.sleep(0.05)

    def serving(self) -> int:
        """Replicas that have their models in memory and take sequences."""
        return sum(not replica.draining for replica in self.status().replicas)

    def healthy(self) -> bool:
        answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def generate(self, request: pb.GenerateRequest) -> pb.GenerateResponse:
        return self._stub.Generate(request, timeout=ANSWER_S)

    def wait_for(self, number: int, bound_s: float) -> float:
        """Until so many replicas serve; returns how long that took."""
        began_s = time.monotonic()
        while (serving := self.serving()) != number:
            assert time.monotonic() - began_s < bound_s, f"{serving} replicas, not {number}"
            time.sleep(0.05)
        return time.monotonic() - began_s

    def stop(self) -> None:
        self._channel.close()
        with contextlib.suppress(OSError):
            self._pipe.send(("stop", None))
        self._driver.join(60)
        if self._driver.is_alive():
            self._driver.kill()
            self._driver.join(60)

    def _tell(self, name: str, argument: Any) -> None:
        self._pipe.send((name, argument))
        self._answer(COMMAND_S)

    def _answer(self, bound_s: float) -> None:
        assert self._pipe.poll(bound_s), "the driver does not answer"
        try:
            error = self._pipe.recv()
        except EOFError:
            error = "the driver has ended; its own output says why"
        assert error is None, error
