"""Proves: a server that is told to stop refuses what is new, finishes what runs and then goes.

The real command in a process of its own, with a tiny pair, on a Ray that it joins or on one of its
own; signals as an operator or a container runtime sends them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode

from cluster.client import NO_RETRY, Client
from cluster.client.retry import is_repeatable
from protos import lockstep_pb2 as pb
from tests.free_ports import free_port
from tests.integration.conftest import STREAM_TOKENS, Keyed
from tests.integration.pairs import pair_flags, write_pair
from tests.serving import lockstep_serve

pytestmark = pytest.mark.ray

READY_S = 240.0
GRACE_S = 120.0
"""Never waited for."""
STOP_S = 60.0
"""For Ray's end where nothing is waited for."""
FLOW_S = 60.0


_BEGIN = """
import sys
from ray.cluster_utils import Cluster

options = dict(num_cpus=2, num_gpus=1, include_dashboard=False, object_store_memory=100 << 20)
cluster = Cluster(initialize_head=True, head_node_args=options)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
_LOOK = """
import ray
from ray.util import list_named_actors

ray.init(log_to_driver=False)
print(sorted(actor["name"] for actor in list_named_actors(all_namespaces=True)))
print(ray.available_resources().get("GPU", 0))
"""


@pytest.fixture(scope="module")
def somebodys_ray() -> Iterator[str]:
    """The address of a Ray with one GPU in its books, begun by another process."""
    process = subprocess.Popen(
        [sys.executable, "-c", _BEGIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin
    assert process.stdout
    overdue = threading.Timer(READY_S, process.kill)
    overdue.start()
    try:
        address = process.stdout.readline().strip()
        overdue.cancel()
        assert address, "Ray did not start"
        yield address
    finally:
        overdue.cancel()
        process.stdin.close()
        process.wait(STOP_S)


def wait_for(condition: Callable[[], bool], wrong: str, pause_s: float = 0.005) -> None:
    deadline_s = time.monotonic() + FLOW_S
    while not condition():
        assert time.monotonic() < deadline_s, wrong
        time.sleep(pause_s)


def nothing_is_left_on(ray_address: str) -> None:
    """Returns when no actor has a name there and the GPU is free; Ray's books may lag behind."""
    look = [sys.executable, "-c", _LOOK]
    environment = {**os.environ, "RAY_ADDRESS": ray_address}

    def is_empty() -> bool:
        seen = subprocess.check_output(look, env=environment, text=True, timeout=STOP_S)
        return seen.splitlines() == ["[]", "1.0"]

    wait_for(is_empty, "something is left", 0.5)


@dataclass
class Streams:
    """Long streams, each in a thread of its own."""

    address: str
    count: int
    api_key: str | None = None
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, pb.End] = field(default_factory=dict)
    errors: dict[int, grpc.RpcError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client = Client(self.address, self.api_key, retry=NO_RETRY)
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(self.count)]

    def begin(self) -> None:
        """Returns when all of them have brought text."""
        for thread in self._threads:
            thread.start()
        wait_for(lambda: len(self.texts) == self.count, "the streams do not flow")

    def bring_more(self) -> None:
        """Returns when each of them has brought more text, or its end, and none an error."""
        before = {number: len(text) for number, text in self.texts.items()}
        wait_for(
            lambda: all(n in self.ends or len(self.texts[n]) > before[n] for n in before),
            "the streams do not flow",
        )
        assert not self.errors

    def join(self, bound_s: float) -> None:
        for thread in self._threads:
            thread.join(bound_s)
        assert not any(thread.is_alive() for thread in self._threads)
        self.client.close()

    @property
    def running(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self, number: int) -> None:
        request = pb.GenerateRequest(
            prompt=f"héllo {number}",
            max_new_tokens=STREAM_TOKENS,
            ignore_eos=True,
            speculation=False,
        )
        try:
            for chunk in self.client.stream(request):
                self.texts[number] = self.texts.get(number, "") + chunk.text
                if chunk.HasField("end"):
                    self.ends[number] = chunk.end
        except grpc.RpcError as error:
            self.errors[number] = error


def refused_while(streams: Streams) -> grpc.RpcError:
    """The refusal of a new request, which came while a stream still ran."""
    while True:
        try:
            new = pb.GenerateRequest(prompt="new", max_new_tokens=1)
            streams.client.generate(new, timeout_s=FLOW_S)
        except grpc.RpcError as error:
            assert streams.running, "the streams were over before the refusal"
            return error
        assert streams.running, "new requests were admitted until the end"


def test_ctrl_c_lets_streams_run_on_and_a_second_signal_stops_at_once(keyed: Keyed) -> None:
    """The last test that has this server."""
    # Two groups, so that they last until the second signal.
    streams = Streams(f"localhost:{keyed.grpc_port}", 16, keyed.alice)
    streams.begin()
    # Every process of the group gets it, those of Ray and the replicas included.
    os.killpg(keyed.process.pid, signal.SIGINT)
    assert refused_while(streams).details() == "the server is stopping"
    streams.bring_more()
    keyed.process.send_signal(signal.SIGTERM)
    assert keyed.process.wait(STOP_S) == 1, keyed.log.read_text(errors="replace")
    streams.join(STOP_S)
    assert streams.errors
    # A client cut off at once may hear it from Serve's proxy, in its words, or from nobody.
    assert all(is_repeatable(error) for error in streams.errors.values())
    assert not streams.errors.keys() & streams.ends.keys()


def test_what_runs_is_finished_what_is_new_refused_and_nothing_left_on_a_ray_that_was_joined(
    tmp_path: Path, somebodys_ray: str
) -> None:
    target, draft = write_pair(tmp_path, positions=STREAM_TOKENS + 48)
    grpc_port, http_port, log = free_port(), free_port(), tmp_path / "log"
    # There is a GPU for one of the two.
    actors = {"drain_s": GRACE_S, "replica_gpus": 1}
    arguments = [
        *("--device", "cpu", *pair_flags(target, draft, blocks=5500), "--replicas", "2"),
        *("--grpc-port", str(grpc_port), "--http-port", str(http_port), "--torch-threads", "1"),
        *("--actors-config", json.dumps(actors)),
    ]
    with lockstep_serve(arguments, log, somebodys_ray) as process:
        said = " ".join(log.read_text(errors="replace").split())
        assert "replica 1 (pid " in said
        assert "on 1 of 2 replica(s)" in said
        streams = Streams(f"localhost:{grpc_port}", 8)
        streams.begin()
        told_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        refused = refused_while(streams)
        print(f"refused after {time.monotonic() - told_s:.2f} s")
        assert refused.code() is StatusCode.UNAVAILABLE
        assert refused.details() == "the server is stopping"
        streams.join(GRACE_S)
        print(f"the streams ended after {time.monotonic() - told_s:.2f} s")
        assert not streams.errors
        for number in range(streams.count):
            assert streams.ends[number].usage.completion_tokens == STREAM_TOKENS
        assert process.wait(GRACE_S) == 0, log.read_text(errors="replace")
        took_s = time.monotonic() - told_s
        print(f"stopped after {took_s:.1f} s")
        assert took_s < GRACE_S
    nothing_is_left_on(somebodys_ray)
