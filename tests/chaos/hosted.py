"""A real cluster in a process of its own: Ray, Serve, the pool, replicas, perhaps several nodes.

The process that starts it stays free of Ray, so it can start several, one after the other, and
beside the Ray of a test session. The other process does what only a process connected to
Ray can: name the cluster's processes, change the number of replicas, take a node away.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from benchmarks.shared.processes import Process
from cluster.client import Client
from cluster.config import ClusterConfig
from cluster.config_sources import from_args
from cluster.frontend.target_text import TargetText
from protos import lockstep_pb2 as pb
from replicas.config import ReplicaConfig
from tests.free_ports import free_port

START_S = 600.0
_CALL_S = 120.0
_ROOT = Path(__file__).resolve().parents[2]


def cluster_config(
    ports: Mapping[str, int] | None = None, replica: Mapping[str, Any] = {}, **settings: Any
) -> ClusterConfig:
    """Settings on free ports, on the CPU, one torch thread per replica."""
    ports = ports or {"grpc_port": free_port(), "http_port": free_port()}
    here = {"target": "tiny", "device": "cpu", "torch_threads": 1}
    return from_args({"server": ports, "replica": {**here, **replica}, **settings})


@dataclass(frozen=True)
class Plan:
    """What to start."""

    config: ClusterConfig
    load: Callable[[ReplicaConfig], Any] | None = None
    """What replicas host; None: the real thing."""
    load_text: Callable[[ReplicaConfig], TargetText] | None = None
    cpus: float = 4
    """What the head node offers Ray; for its bookkeeping only."""
    worker_nodes: int = 0
    """More nodes, each with one CPU and, as far as Ray knows, one GPU."""
    pool_on_worker: bool = False
    """The pool begins on a worker node, and restarts on one."""
    pool: type | None = None
    """The class of the pool's actor; None: the real thing."""
    declared: dict[str, Any] | None = None
    """A Serve config file to deploy as `serve deploy` does; `config` says the same."""


class HostError(RuntimeError):
    """The process that holds the cluster failed or did not answer in time."""


class HostedCluster:
    """A context manager around the cluster of a plan. Calls may come from several threads."""

    def __init__(self, plan: Plan) -> None:
        self.config = plan.config
        self.address = f"localhost:{plan.config.server.grpc_port}"
        self.http = f"http://127.0.0.1:{plan.config.server.http_port}"
        self._plan = plan
        self._lock = threading.Lock()

    def __enter__(self) -> HostedCluster:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Ray tells its driver at length of every process that dies.
        log, self.log_path = tempfile.mkstemp(prefix="lockstep-host-", suffix=".log")
        os.close(log)
        self._process = context.Process(
            target=_host, args=(theirs, self._plan, self.log_path), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self._answer(START_S)
            self.wait_for_replicas(self.config.replicas, START_S)
        except BaseException as error:
            error.add_note(Path(self.log_path).read_text()[-4000:])
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(("stop", ()))
        self._process.join(_CALL_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_CALL_S)
        self._pipe.close()
        os.unlink(self.log_path)

    # ------------------------------------------------------------------ through the other process

    def processes(self, kind: str = "") -> list[Process]:
        """The cluster's living processes; those of one kind, if it is named."""
        found: list[Process] = self._call("processes")
        return [process for process in found if kind in ("", process.kind)]

    def process(self, kind: str) -> Process:
        """The only one of its kind; waits until it is there."""
        deadline_s = time.monotonic() + _CALL_S
        while not (found := self.processes(kind)):
            assert time.monotonic() < deadline_s, f"no {kind}"
            time.sleep(0.05)
        (only,) = found
        return only

    def scale(self, replicas: int) -> None:
        """Serve starts or drains replicas from now on; returns at once."""
        self._call("scale", replicas)

    def deploy(self, config: ClusterConfig) -> None:
        """The same cluster with other settings; returns when Serve says that it is done."""
        self.become(replace(self._plan, config=config))

    def become(self, plan: Plan) -> None:
        """Deploys another plan on the Ray and the ports that are there."""
        self._call("deploy", plan)

    def ray_address(self) -> str:
        """By which others join its Ray."""
        address: str = self._call("ray_address")
        return address

    def change(self, number: int) -> None:
        """Deploys settings of the plan that give no other tokens, as the number draws them; returns
        while Serve rolls them out."""
        replica = self.config.replica
        given = replica.model_dump(exclude_unset=True)
        if number % 2:
            given["speculative_config"] = {"method": "suffix"}
        frontend = self.config.frontend.model_copy(update={"coalesce_ms": 10.0 + number})
        config = self.config.model_copy(
            update={"replica": ReplicaConfig(**given), "frontend": frontend}
        )
        self._call("change", replace(self._plan, config=config))

    def declare(self, data: dict[str, Any]) -> None:
        """`serve deploy` with these settings; returns at once."""
        self._call("declare", data)

    def state(self) -> tuple[str, str, dict[str, dict[str, int]]]:
        """Serve's word for the application, its reasons, and replicas by deployment and state."""
        found: tuple[str, str, dict[str, dict[str, int]]] = self._call("state")
        return found

    def wait_for_state(
        self, done: Callable[[str, str, dict[str, dict[str, int]]], bool], bound_s: float = 120.0
    ) -> None:
        deadline_s = time.monotonic() + bound_s
        while not done(*(seen := self.state())):
            assert time.monotonic() < deadline_s, f"not within {bound_s} s: {seen}"
            time.sleep(0.2)

    def lose_node(self, node_id: str) -> None:
        """SIGKILL to all that runs on a worker node."""
        self._call("lose_node", node_id)

    def drain_node(self, node_id: str, notice_s: float) -> None:
        """Tells Ray that a node goes after so long, as a spot machine does."""
        self._call("drain_node", node_id, notice_s)

    def add_node(self) -> None:
        """One more worker node."""
        self._call("add_node")

    def _call(self, name: str, *args: Any) -> Any:
        with self._lock:
            self._pipe.send((name, args))
            return self._answer(_CALL_S)

    def _answer(self, bound_s: float) -> Any:
        try:
            if not self._pipe.poll(bound_s):
                raise HostError(f"no answer within {bound_s:.0f} s")
            failed, answer = self._pipe.recv()
        except EOFError:
            raise HostError("the process that holds the cluster is gone") from None
        if failed:
            raise HostError(answer)
        return answer

    # ------------------------------------------------------------------ through gRPC

    def wait_for(
        self, condition: Callable[[pb.StatusResponse], bool], bound_s: float = 120.0
    ) -> pb.StatusResponse:
        """The first status for which `condition` holds; there is none while the pool restarts."""
        deadline_s = time.monotonic() + bound_s
        seen: object = None
        with Client(self.address) as client:
            while True:
                try:
                    seen = status = client.status()
                    if condition(status):
                        return status
                except grpc.RpcError as error:
                    seen = error
                assert time.monotonic() < deadline_s, f"not within {bound_s} s: {seen}"
                time.sleep(0.05)

    def wait_for_replicas(self, count: int, bound_s: float = 120.0) -> pb.StatusResponse:
        """Until exactly so many replicas serve."""
        return self.wait_for(
            lambda status: [replica.draining for replica in status.replicas] == [False] * count,
            bound_s,
        )

    def wait_for_requests(self, count: int) -> pb.StatusResponse:
        """Until the pool has so many; none of them may end before the last one has come."""
        return self.wait_for(lambda status: status.running + status.waiting == count)

    def wait_for_tokens(self, more: int) -> None:
        """Until the replicas, whichever they are, have committed so many tokens from now on."""
        last = self.wait_for(lambda _status: True).tokens_committed
        seen = 0

        def enough(status: pb.StatusResponse) -> bool:
            nonlocal last, seen
            # A replica's count goes with it, and all of them with their pool.
            seen += max(status.tokens_committed - last, 0)
            last = status.tokens_committed
            return seen > more

        self.wait_for(enough)

    def wait_until_idle(self, bound_s: float = 60.0) -> pb.StatusResponse:
        """Until no sequence and no KV block is left over."""

        def idle(status: pb.StatusResponse) -> bool:
            free = all(replica.kv_blocks_free == replica.kv_blocks for replica in status.replicas)
            return free and status.waiting == 0 and status.running == 0

        return self.wait_for(idle, bound_s)


# --------------------------------------------------------------------------- the other process


def _host(pipe: Connection, plan: Plan, log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    # That of the starting process may be a cluster's that runs beside it.
    os.environ.pop("RAY_SERVE_PROXY_USE_GRPC", None)
    # Workers import what the plan names.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    # Ray reads some variables as it is imported.
    from tests.chaos.held import Held

    held = Held(plan)
    try:
        try:
            # Where it hangs, if it does.
            faulthandler.dump_traceback_later(0.8 * START_S, file=log)
            held.start()
            faulthandler.cancel_dump_traceback_later()
            pipe.send((False, None))
        except Exception:
            pipe.send((True, traceback.format_exc()))
            return
        while True:
            name, args = pipe.recv()
            if name == "stop":
                return
            try:
                pipe.send((False, getattr(held, name)(*args)))
            except Exception:
                pipe.send((True, traceback.format_exc()))
    except EOFError:
        pass
    finally:
        held.stop()
