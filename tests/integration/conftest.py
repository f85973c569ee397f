"""One real cluster for all integration tests: Ray, Serve, the pool, two replicas, real gRPC.

The pair is tiny and random; the reference is transformers' own `generate` of its target.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest

from benchmarks.processes import lives
from cluster.client import Client
from cluster.config import ClusterConfig, from_args
from protos import lockstep_pb2 as pb
from tests.free_ports import free_port
from tests.integration.pairs import write_pair

READY_S = 240.0
Expected = Callable[[list[str], int], list[list[int]]]


@dataclass(frozen=True)
class RunningCluster:
    """A cluster that serves, and how to reach it."""

    config: ClusterConfig
    address: str
    http: str

    def replica_processes(self) -> dict[str, int]:
        """Process ids of the replicas by actor name, as Ray knows them."""
        return _serve_processes("#replica#")

    def wait_for_replicas(self, count: int, bound_s: float = READY_S) -> pb.StatusResponse:
        deadline_s = time.monotonic() + bound_s
        seen: object = None
        with Client(self.address) as client:
            while True:
                try:
                    seen = status = client.status()
                    if len(status.replicas) == count:
                        return status
                except grpc.RpcError as error:
                    # The pool may have been killed, and be late.
                    seen = error
                assert time.monotonic() < deadline_s, f"not {count} replicas: {seen}"
                time.sleep(0.1)


def _serve_processes(part: str) -> dict[str, int]:
    """Ids of the processes of this cluster's Serve replicas whose actor name holds `part`."""
    import ray
    from ray._private.state import actors

    assert ray.is_initialized()
    return {
        actor["Name"]: actor["Pid"]
        for actor in actors(actor_state_name="ALIVE").values()
        if part in (actor["Name"] or "") and lives(actor["Pid"])
    }


def start_ray(num_cpus: int, tries: int = 2) -> None:
    """Start a Ray of this process.

    It forks from a process that has had threads by the dozen, and once its raylet never began: not
    even a log of it. So there is a second try, which says so.
    """
    import ray

    for left in reversed(range(tries)):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=100 << 20,
                log_to_driver=False,
                configure_logging=False,
            )
            return
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
            print("Ray's node did not come up; once more")
            ray.shutdown()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    import ray

    from cluster import app

    os.environ["OMP_NUM_THREADS"] = "1"
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    config = from_args(
        {
            "replicas": 2,
            "target": str(target),
            "draft": str(draft),
            "device": "cpu",
            "kv_memory_mb": 16,
            "torch_threads": 1,
            "grpc_port": free_port(),
            "http_port": free_port(),
        }
    )
    # As `ClusterRun` does where it starts Ray.
    os.environ.update(app.ray_environment(config))
    start_ray(num_cpus=2)
    started = app.ClusterRun(config)
    try:
        started.start()
        address = f"localhost:{config.server.grpc_port}"
        with Client(address) as client:
            client.wait_until_ready(READY_S)
        running = RunningCluster(config, address, f"http://127.0.0.1:{config.server.http_port}")
        running.wait_for_replicas(2)
        yield running
    finally:
        try:
            started.stop()
        finally:
            ray.shutdown()


@pytest.fixture(scope="session")
def expected(cluster: RunningCluster) -> Expected:
    """New tokens by plain decoding of the target, cached by prompt and count."""
    from cluster.frontend.target_text import TargetText
    from cluster.verify import transformers_greedy
    from scheduler.messages import Request

    text = TargetText.load(cluster.config.replica)
    known: dict[tuple[str, int], list[int]] = {}

    def tokens(prompts: list[str], count: int) -> list[list[int]]:
        new = [prompt for prompt in dict.fromkeys(prompts) if (prompt, count) not in known]
        requests = [Request(prompt, text.encode(prompt), count) for prompt in new]
        for prompt, out in zip(
            new,
            transformers_greedy(cluster.config.replica, requests, text.eos_token_ids),
            strict=True,
        ):
            known[prompt, count] = out
        return [known[prompt, count] for prompt in prompts]

    return tokens


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[Client]:
    with Client(cluster.address) as made:
        yield made
