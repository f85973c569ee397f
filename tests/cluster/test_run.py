"""Proves: starting and stopping leaves alone what others run, and what does not start says why."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from grpc._cython import cygrpc
from ray import serve
from ray._private import worker
from ray.serve import RunTarget
from ray.serve._private import constants as serve_constants
from ray.serve._private.common import REPLICA_ID_FULL_ID_STR_PREFIX

from cluster import checks, own_ray, run
from cluster.config_sources import from_args
from cluster.run import ClusterRun, StartFailed
from cluster.serve_view import APP_NAME
from tests.free_ports import free_port

CONFIG = from_args({})
APPLICATION: Any = object()


class Serve:
    """What Serve says of itself: proxies once it runs, and the application's states in turn."""

    def __init__(self) -> None:
        self.proxies: dict[str, str] = {}
        self.deployed = False
        self.states = ["DEPLOYING", "RUNNING"]
        self.deleting = ["RUNNING", "DELETING", ""]
        """What comes once it is told to delete the application."""
        self.message = ""
        self.deployments: dict[str, Any] = {}
        self.http_config = SimpleNamespace(port=CONFIG.server.http_port)
        self.grpc_config = SimpleNamespace(port=CONFIG.server.grpc_port)

    def status(self) -> Any:
        if not self.deployed:
            return SimpleNamespace(proxies=self.proxies, applications={})
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        ours = SimpleNamespace(status=state, message=self.message, deployments=self.deployments)
        return SimpleNamespace(proxies=self.proxies, applications={APP_NAME: ours} if state else {})


@pytest.fixture
def seen() -> Serve:
    return Serve()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, seen: Serve, tmp_path: Path) -> list[Any]:
    """What was called of Ray and Serve, which do nothing; neither runs at first."""
    made: list[Any] = []

    def note(name: str) -> Any:
        return lambda *args, **_options: made.append((name, *args) if args else name)

    def init(address: str | None = None, **_options: Any) -> None:
        made.append(("init", address))
        monkeypatch.setattr(ray, "is_initialized", lambda: True)

    def run_many(targets: list[RunTarget], **options: bool) -> None:
        waits = ("wait_for_ingress_deployment_creation", "wait_for_applications_running")
        assert options == dict.fromkeys(waits, False)
        assert [(target.name, target.route_prefix) for target in targets] == [(APP_NAME, "/")]
        seen.deployed = True

    def delete(name: str, _blocking: bool) -> None:
        made.append(("delete", name))
        seen.states = seen.deleting

    def stop_pools(pools: list[str], grace_s: float) -> None:
        made.append(("stop_pools", *pools, grace_s))

    # Nothing of this machine's is looked at, made or left changed.
    for name in ("PYTHONPATH", *run.ray_environment(CONFIG)):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        if not os.environ[name]:
            monkeypatch.delenv(name)
    for name, value in (("HOME", tmp_path), ("RAY_TMPDIR", tmp_path), ("RAY_AUTH_MODE", "none")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(own_ray, "_FOLDER_BYTES_MAX", 1000)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    # As Ray has it where it has begun the Ray that it is connected to.
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(is_head=lambda: True))
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(run, "stop_pools", stop_pools)
    for name in ("kill", "shutdown"):
        monkeypatch.setattr(ray, name, note(name))
    monkeypatch.setattr(run, "list_named_actors", lambda all_namespaces: ACTORS)
    monkeypatch.setattr(serve, "delete", delete)
    monkeypatch.setattr(serve, "start", note("serve.start"))
    monkeypatch.setattr(serve, "run_many", run_many)
    monkeypatch.setattr(serve, "shutdown", note("serve.shutdown"))
    monkeypatch.setattr(serve, "status", seen.status)
    monkeypatch.setattr(run, "_LOOK_S", 0.0)
    monkeypatch.setattr(run, "_get_global_client", lambda: seen)
    monkeypatch.setattr(run, "check_ports", lambda _config: None)
    monkeypatch.setattr(run, "check_on_nodes", note("check_on_nodes"))
    return made


OURS = [
    f"{REPLICA_ID_FULL_ID_STR_PREFIX}{APP_NAME}#{deployment}"
    for deployment in ("replica#a", "frontend#b")
]
ACTORS = [
    {"name": name, "namespace": "serve"}
    for name in (*OURS, f"{REPLICA_ID_FULL_ID_STR_PREFIX}another#replica#c", "SERVE_CONTROLLER")
]
STOP = ("stop_pools", CONFIG.pool_name, CONFIG.actors.drain_s)
CUT = ("stop_pools", CONFIG.pool_name, 0.0)
DELETE = ("delete", APP_NAME)
KILL = ("kill", CONFIG.pool_name)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("whose_ray", "whose_serve", "ended"),
    [
        ("ours", "ours", [DELETE, "serve.shutdown", KILL, "shutdown"]),
        ("joined", "ours", [DELETE, "serve.shutdown", KILL, "shutdown"]),
        ("joined as a client", "ours", [DELETE, "serve.shutdown", KILL, "shutdown"]),
        ("joined", "theirs", [DELETE, KILL, "shutdown"]),
        ("the caller's", "ours", [DELETE, "serve.shutdown", KILL]),
    ],
)
def test_a_stop_ends_what_was_begun_here_and_nothing_of_others(
    whose_ray: str,
    whose_serve: str,
    ended: list[Any],
    at_once: bool,
    calls: list[Any],
    seen: Serve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if whose_ray == "the caller's":
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
    if whose_ray.startswith("joined"):
        monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    if whose_ray != "ours":
        node = None if "client" in whose_ray else SimpleNamespace(is_head=lambda: False)
        monkeypatch.setattr(worker, "_global_node", node)
    if whose_serve == "theirs":
        seen.proxies = {"node": "HEALTHY"}
    cluster = ClusterRun(CONFIG)
    cluster.deploy(APPLICATION, join_ray=True)
    assert not cluster.updates
    begun = {"ours": [("init", "local")], "the caller's": []}.get(whose_ray, [("init", None)])
    assert calls == [*begun, "serve.start"]
    calls.clear()
    cluster.stop(at_once)
    if not at_once:
        assert calls == [STOP, *ended]
    elif whose_ray == "ours":
        # It takes everything with it, whatever hangs.
        assert calls == [CUT, KILL, "shutdown"]
    else:
        # Until Serve has heard of the deletion it would replace what is killed.
        assert calls == [CUT, DELETE, *(("kill", name) for name in OURS), *ended[1:]]


def test_a_stop_at_once_leaves_to_serve_what_takes_it_long(
    calls: list[Any], seen: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_DELETE_S", 0.05)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    seen.deleting = ["DELETING"]
    cluster = ClusterRun(CONFIG)
    cluster.deploy(APPLICATION)
    cluster.stop(at_once=True)
    assert calls[-2:] == ["serve.shutdown", KILL]


def test_a_stop_before_anything_was_deployed_deletes_nothing(
    calls: list[Any], seen: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    ClusterRun(CONFIG).stop()
    assert calls == []
    cluster = ClusterRun(CONFIG)
    cluster.deploy(APPLICATION)
    cluster.deploy(APPLICATION)
    assert cluster.updates
    seen.deployed = False
    cluster.stop()
    assert DELETE not in calls


def test_what_another_run_has_put_there_stays_unless_the_user_says_otherwise(
    calls: list[Any], seen: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    monkeypatch.setattr(worker, "_global_node", SimpleNamespace(is_head=lambda: False))
    seen.deployed = True
    seen.proxies = {"node": "HEALTHY"}
    cluster = ClusterRun(CONFIG)
    with pytest.raises(StartFailed, match=r"left unchanged\. --replace replaces it"):
        cluster.deploy(APPLICATION, join_ray=True)
    cluster.stop(at_once=True)
    assert calls == [("init", None), ("stop_pools", 0.0), "shutdown"]
    calls.clear()
    cluster = ClusterRun(CONFIG)
    cluster.deploy(APPLICATION, join_ray=True, replace=True)
    # What can be wrong is found before anything there is touched.
    assert [call if isinstance(call, str) else call[0] for call in calls] == [
        *("check_on_nodes", "serve.start"),
    ]
    assert cluster.updates
    cluster.stop()
    assert DELETE in calls


def test_a_serve_that_listens_elsewhere_is_no_place_for_these_ports(
    calls: list[Any], seen: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    seen.proxies = {"node": "HEALTHY"}
    seen.http_config = SimpleNamespace(port=8123)
    with pytest.raises(StartFailed, match="HTTP on port 8123 and gRPC on port 9000; give these by"):
        ClusterRun(CONFIG).deploy(APPLICATION, join_ray=True)
    assert "serve.start" not in calls


def test_a_taken_port_and_a_missing_model_are_named_before_ray_begins(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "check_ports", checks.check_ports)
    ports = {"http_port": free_port(), "grpc_port": free_port()}
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports["grpc_port"]))
        other.listen()
        with pytest.raises(StartFailed, match=f"grpc_port: port {ports['grpc_port']} of .* in use"):
            ClusterRun(from_args({"server": ports})).deploy(APPLICATION)
    with pytest.raises(StartFailed, match=f"target: {tmp_path}/none: no such file or directory"):
        ClusterRun(from_args({"server": ports, "replica": {"target": f"{tmp_path}/none"}})).deploy(
            APPLICATION
        )
    assert calls == []


def test_a_ray_of_our_own_is_told_what_the_user_has_not_said(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = run.ray_environment(CONFIG)
    for name in told:
        monkeypatch.setenv(name, "said")
        if name != "RAY_SERVE_PROXY_USE_GRPC":
            monkeypatch.delenv(name)
    ClusterRun(CONFIG).start(APPLICATION)
    assert ("init", "local") in calls
    told["RAY_SERVE_PROXY_USE_GRPC"] = "said"
    assert told.items() <= os.environ.items()


def test_what_rays_processes_log_goes_to_who_is_told_and_not_to_the_terminal(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rays_own(logged: Any) -> None:
        worker.print_worker_logs(logged, sys.stdout)

    monkeypatch.setattr(worker, "_worker_logs_enabled", True)
    monkeypatch.setattr(run.dispatcher, "handlers", [("ray", rays_own)])
    told: list[Any] = []
    line = {"ip": "192.0.2.1", "pid": 7, "lines": ["is up"]}
    ClusterRun(CONFIG).deploy(APPLICATION, tell=told.append)
    run.dispatcher.emit(line)
    assert told == [line]
    assert capsys.readouterr() == ("", "")


def test_serve_and_grpc_read_what_they_are_told() -> None:
    told = run.ray_environment(CONFIG)
    source = Path(serve_constants.__file__).read_text()
    assert all(f'"{name}"' in source for name in told if name.startswith("RAY_SERVE_"))
    known = Path(cygrpc.__file__).read_bytes()  # A name that it does not know gRPC passes over.
    assert all(
        experiment.strip("-").encode() in known
        for experiment in told["GRPC_EXPERIMENTS"].split(",")
    )
    # Whatever a proxy takes gets through to the frontend.
    inner = int(told["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"])
    assert inner > int(told["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"])


def failed(*messages: str) -> Callable[[Serve], None]:
    """Serve gives up, and says this of its deployments."""

    def say(seen: Serve) -> None:
        seen.states = ["DEPLOYING", "DEPLOY_FAILED"]
        seen.message = "as Serve\n says"
        seen.deployments = {
            str(n): SimpleNamespace(message=message) for n, message in enumerate(messages)
        }

    return say


def refused(message: str) -> Callable[[Serve], None]:
    def say(seen: Serve) -> None:
        seen.states = ["DEPLOYING"]
        seen.deployments = {"replica": SimpleNamespace(message=message, replica_states={})}

    return say


def late(seen: Serve) -> None:
    """One of two replicas comes up, and no frontend."""
    seen.states = ["DEPLOYING"]
    states = {"RUNNING": 1, "STARTING": 1}
    seen.deployments = {
        "replica": SimpleNamespace(replica_states=states, message="No\nGPU."),
        "frontend": SimpleNamespace(replica_states={"STARTING": 1}, message=""),
    }


def deleted(seen: Serve) -> None:
    seen.states = ["DEPLOYING", ""]


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        (
            failed("Error:\n  File x\nOSError: gone\n", "", "E:\n  File y\nOSError: gone"),
            "OSError: gone",
        ),
        (failed("E:\n  File x\nA: one", "E:\n  File x\nB: two", "is slow"), "A: one; B: two"),
        (failed("E:\n  File x\nOSError: none\nSee there."), "OSError: none See there."),
        (failed("Replicas: 1 starting"), "as Serve says"),
        # Serve says that it tries again, and would meet it again.
        (
            refused("ray.x:\n  File x\nreplicas.errors.PairRefused: no\nfit"),
            "replicas.errors.PairRefused: no fit",
        ),
        (late, "not up within 0.05 s (actors.start_s); replica: 1 up (No GPU.); frontend: 0 up"),
        (deleted, "the application was deleted while it started"),
    ],
)
def test_what_does_not_start_says_why(
    happens: Callable[[Serve], None], said: str, calls: list[Any], seen: Serve
) -> None:
    happens(seen)
    cluster = ClusterRun(from_args({"actors": {"start_s": 0.05}}))
    with pytest.raises(StartFailed) as raised:
        cluster.start(APPLICATION)
    assert str(raised.value) == said
    assert cluster.replicas_up == (happens is late)
