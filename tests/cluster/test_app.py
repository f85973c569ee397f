"""Proves: starting and stopping leaves alone what others run; replicas ask for the right GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray._private import worker
from ray.serve import RunTarget
from ray.serve._private import constants as serve_constants
from ray.serve._private.common import REPLICA_ID_FULL_ID_STR_PREFIX

from cluster import app, serve_app
from cluster.config import ConfigError
from cluster.config_sources import from_args
from cluster.serve_app import StartFailed
from cluster.worker import resources

CONFIG = from_args({})


class Serve:
    """What Serve says of itself: proxies once it runs, and the application's states in turn."""

    def __init__(self) -> None:
        self.proxies: dict[str, str] = {}
        self.deployed = False
        self.states = ["DEPLOYING", "RUNNING"]
        self.message = ""
        self.deployments: dict[str, Any] = {}

    def status(self) -> Any:
        if not self.deployed:
            return SimpleNamespace(proxies=self.proxies, applications={})
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        ours = SimpleNamespace(status=state, message=self.message, deployments=self.deployments)
        applications = {app.APP_NAME: ours} if state else {}
        return SimpleNamespace(proxies=self.proxies, applications=applications)


@pytest.fixture
def seen() -> Serve:
    return Serve()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, seen: Serve) -> list[Any]:
    """What was called of Ray and Serve, which do nothing; neither runs at first."""
    made: list[Any] = []

    def note(name: str) -> Any:
        return lambda *args, **_options: made.append((name, *args) if args else name)

    def init(address: str | None, **_options: Any) -> None:
        made.append(("init", address))
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        # As Ray does it where none is found; a test that wants one to be found says so.
        monkeypatch.setattr(worker, "_global_node", SimpleNamespace(is_head=lambda: True))

    def run_many(targets: list[RunTarget], **options: bool) -> None:
        assert options == {
            "wait_for_ingress_deployment_creation": False,
            "wait_for_applications_running": False,
        }
        assert [(one.name, one.route_prefix) for one in targets] == [(app.APP_NAME, "/")]
        seen.deployed = True

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(
        app,
        "stop_pools",
        lambda pools, grace_s, _silent_s: made.append(("stop_pools", *pools, grace_s)),
    )
    for module, name in [(ray, "kill"), (ray, "shutdown"), (serve, "delete")]:
        monkeypatch.setattr(module, name, note(name))
    monkeypatch.setattr(serve, "start", note("serve.start"))
    monkeypatch.setattr(serve, "run_many", run_many)
    monkeypatch.setattr(serve, "shutdown", note("serve.shutdown"))
    monkeypatch.setattr(serve, "status", seen.status)
    monkeypatch.setattr(serve_app, "_LOOK_S", 0.0)
    return made


def join(calls: list[Any], monkeypatch: pytest.MonkeyPatch, node: object) -> app.ClusterRun:
    """A cluster that was deployed on a Ray that was there before."""

    def init(address: str | None, **_options: Any) -> None:
        calls.append(("init", address))
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(worker, "_global_node", node)

    monkeypatch.setattr(ray, "init", init)
    cluster = app.ClusterRun(CONFIG)
    cluster.deploy(APPLICATION, join_ray=True)
    return cluster


APPLICATION: Any = object()
KILL_POOL = ("kill", CONFIG.pool_name)
STOP_POOL = ("stop_pools", CONFIG.pool_name, CONFIG.actors.drain_s)
CUT_POOL = ("stop_pools", CONFIG.pool_name, 0.0)
DELETE = ("delete", "lockstep")
JOINED_NODE = SimpleNamespace(is_head=lambda: False)


@pytest.mark.parametrize(
    ("join_ray", "at_once", "ended"),
    [
        (False, False, [STOP_POOL, DELETE, "serve.shutdown"]),
        (False, True, [CUT_POOL]),
        # No Ray is found to join.
        (True, True, [CUT_POOL]),
    ],
)
def test_a_ray_that_was_begun_here_is_stopped_whole(
    join_ray: bool, at_once: bool, ended: list[Any], calls: list[Any]
) -> None:
    cluster = app.ClusterRun(CONFIG)
    cluster.deploy(APPLICATION, join_ray=join_ray)
    cluster.stop(at_once)
    begun = [("init", None if join_ray else "local"), "serve.start"]
    assert calls == [*begun, *ended, KILL_POOL, "shutdown"]


def test_a_ray_of_our_own_is_told_what_the_user_has_not_said(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = app.ray_environment(CONFIG)
    for name in told:
        monkeypatch.setenv(name, "said")
        if name != "RAY_SERVE_PROXY_USE_GRPC":
            monkeypatch.delenv(name)
    app.ClusterRun(CONFIG).start(APPLICATION)
    assert ("init", "local") in calls
    expected = {**told, "RAY_SERVE_PROXY_USE_GRPC": "said"}
    assert {name: os.environ[name] for name in told} == expected


def test_serve_reads_what_it_is_told() -> None:
    told = app.ray_environment(CONFIG)
    source = Path(serve_constants.__file__).read_text()
    assert all(f'"{name}"' in source for name in told if name.startswith("RAY_SERVE_"))
    # Whatever a proxy takes gets through to the frontend.
    inner = int(told["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"])
    assert inner > int(told["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"])


@pytest.mark.parametrize("node", [JOINED_NODE, None], ids=["of a cluster", "ray client"])
def test_on_a_joined_ray_a_stop_at_once_deletes_the_application_and_kills_its_replicas(
    node: object, calls: list[Any], seen: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [f"{REPLICA_ID_FULL_ID_STR_PREFIX}lockstep#{one}" for one in ("replica#a", "frontend#b")]
    actors = [
        {"name": name, "namespace": "serve"}
        for name in (*ours, f"{REPLICA_ID_FULL_ID_STR_PREFIX}another#replica#c", "SERVE_CONTROLLER")
    ]
    monkeypatch.setattr(serve_app, "list_named_actors", lambda all_namespaces: actors)
    cluster = join(calls, monkeypatch, node)
    # Until Serve has heard of the deletion it would replace what is killed.
    seen.states = ["RUNNING", "RUNNING", "DELETING", ""]
    cluster.stop(at_once=True)
    kills = [("kill", name) for name in ours]
    ended = [DELETE, *kills, "serve.shutdown", KILL_POOL, "shutdown"]
    assert calls == [("init", None), "serve.start", CUT_POOL, *ended]


def test_a_stop_at_once_leaves_to_serve_what_takes_it_long(
    calls: list[Any], seen: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_app, "list_named_actors", lambda all_namespaces: [])
    monkeypatch.setattr(serve_app, "_DELETE_S", 0.05)
    cluster = join(calls, monkeypatch, JOINED_NODE)
    seen.states = ["DELETING"]
    cluster.stop(at_once=True)
    assert calls[-4:] == [DELETE, "serve.shutdown", KILL_POOL, "shutdown"]


def test_a_stop_at_once_before_anything_was_deployed_deletes_nothing(
    calls: list[Any], seen: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = join(calls, monkeypatch, JOINED_NODE)
    seen.deployed = False
    cluster.stop(at_once=True)
    assert DELETE not in calls


def test_a_serve_that_ran_before_keeps_running(
    calls: list[Any], seen: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen.proxies = {"node": "HEALTHY"}
    cluster = join(calls, monkeypatch, JOINED_NODE)
    cluster.stop()
    expected = [("init", None), "serve.start", STOP_POOL, DELETE, KILL_POOL, "shutdown"]
    assert calls == expected


def test_a_ray_of_the_caller_stays_connected(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    cluster = app.ClusterRun(CONFIG)
    cluster.start(APPLICATION)
    cluster.stop()
    assert calls == ["serve.start", STOP_POOL, DELETE, "serve.shutdown", KILL_POOL]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (
            ["Error:\n  File x\nOSError: gone\n", "", "E:\n  File y\nOSError: gone"],
            "^OSError: gone$",
        ),
        (["E:\n  File x\nA: one", "E:\n  File x\nB: two", "is slow"], "^A: one; B: two$"),
        (["E:\n  File x\nOSError: none\nSee there."], "^OSError: none See there.$"),
        (["Replicas: 1 starting"], "^as Serve says$"),
    ],
)
def test_what_does_not_start_says_why(
    messages: list[str], error: str, calls: list[Any], seen: Serve
) -> None:
    seen.states = ["DEPLOYING", "DEPLOY_FAILED"]
    seen.message = "as Serve\n says"
    seen.deployments = {str(n): SimpleNamespace(message=one) for n, one in enumerate(messages)}
    with pytest.raises(StartFailed, match=error):
        app.ClusterRun(CONFIG).start(APPLICATION)


def test_what_does_not_come_up_in_time_says_what_there_is(calls: list[Any], seen: Serve) -> None:
    seen.states = ["DEPLOYING"]
    seen.deployments = {
        "replica": SimpleNamespace(
            replica_states={"RUNNING": 1, "STARTING": 1}, message="No\nGPU."
        ),
        "frontend": SimpleNamespace(replica_states={"STARTING": 1}, message=""),
    }
    cluster = app.ClusterRun(from_args({"actors": {"start_s": 0.05}}))
    with pytest.raises(StartFailed) as raised:
        cluster.start(APPLICATION)
    said = "not up within 0.05 s (actors.start_s); replica: 1 up (No GPU.); frontend: 0 up"
    assert str(raised.value) == said
    assert cluster.replicas_up == 1


def test_an_application_that_is_deleted_while_it_starts_is_not_waited_for(
    calls: list[Any], seen: Serve
) -> None:
    seen.states = ["DEPLOYING", ""]
    with pytest.raises(StartFailed, match="deleted"):
        app.ClusterRun(CONFIG).start(APPLICATION)


def test_an_application_that_was_there_before_is_known_to_be_updated(
    calls: list[Any], seen: Serve
) -> None:
    cluster = app.ClusterRun(CONFIG)
    cluster.deploy(APPLICATION)
    assert not cluster.updates
    cluster.deploy(APPLICATION)
    assert cluster.updates


def test_stopping_what_never_started_starts_nothing(calls: list[Any]) -> None:
    app.ClusterRun(CONFIG).stop()
    assert calls == []


def deployed_replicas(settings: dict[str, Any]) -> Any:
    """Serve's deployment of them."""
    return app.build_app(from_args(settings))._bound_deployment.init_args[2]._bound_deployment


@pytest.mark.parametrize(
    ("settings", "machine", "each"),
    [
        ({"device": "cuda", "replicas": 2}, 1, 1.0),
        ({"device": "cuda:1"}, 2, 0.0),
        ({"device": "cpu"}, 8, 0.0),
        ({"device": "auto"}, 0, 0.0),
        ({"device": "auto", "replicas": 2}, 8, 1.0),
        ({"device": "auto", "replicas": 2}, 1, 0.5),
        ({"device": "auto", "replicas": 4}, 3, 0.5),
        ({"device": "auto", "replicas": 3}, 1, 0.3333),
        ({"device": "cuda", "actors": {"replica_gpus": 0.25}}, 1, 0.25),
        ({"device": "cuda", "replica": {"tensor_parallel": 2}}, 0, 1.0),
        ({"device": "auto", "replica": {"tensor_parallel": 2}}, 4, 1.0),
        ({"device": "auto", "replica": {"tensor_parallel": 2}}, 0, 0.0),
        ({"device": "cpu", "replica": {"tensor_parallel": 2}}, 4, 0.0),
    ],
)
def test_gpus_of_a_replica(
    settings: dict[str, Any], machine: int, each: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": machine} if machine else {})
    replicas = deployed_replicas(settings)
    assert replicas.ray_actor_options["num_gpus"] == each
    # Of its memory, too: the first to load must not take all that is free.
    told = replicas.init_args[0].replica.gpu_share
    assert told == (each if 0 < each < 1 else None)


@pytest.mark.parametrize(
    ("settings", "bundle", "strategy"),
    [
        ({"device": "cuda"}, {"CPU": 0.1, "GPU": 1.0}, "STRICT_PACK"),
        (
            {"device": "cuda", "actors": {"ranks_strategy": "PACK"}},
            {"CPU": 0.1, "GPU": 1.0},
            "PACK",
        ),
        ({"device": "cpu", "actors": {"replica_cpus": 2}}, {"CPU": 2.0}, "STRICT_PACK"),
        # Ray refuses a bundle of nothing.
        ({"device": "cpu", "actors": {"replica_cpus": 0}}, {"CPU": 0.001}, "STRICT_PACK"),
    ],
)
def test_ranks_have_a_bundle_each_in_the_placement_group_of_their_replica(
    settings: dict[str, Any], bundle: dict[str, float], strategy: str
) -> None:
    deployment = deployed_replicas({**settings, "replica": {"tensor_parallel": 3}})
    wanted = deployment._replica_config
    assert wanted.placement_group_bundles == [bundle] * 3
    assert wanted.placement_group_strategy == strategy
    # The replica itself is rank 0, in the first bundle.
    assert deployment.ray_actor_options["num_gpus"] == bundle.get("GPU", 0.0)


def test_a_part_of_a_gpu_is_too_little_for_a_rank() -> None:
    settings = {"replica": {"tensor_parallel": 2}, "actors": {"replica_gpus": 0.5}}
    with pytest.raises(
        ConfigError, match=r"actors\.replica_gpus: a rank needs a GPU of its own, not 0\.5"
    ):
        from_args(settings)


def test_a_replica_on_one_device_has_no_placement_group() -> None:
    replicas = deployed_replicas({"device": "cuda"})
    assert replicas._replica_config.placement_group_bundles is None


def test_without_a_ray_auto_asks_for_no_gpu() -> None:
    assert resources.gpus_of(from_args({"device": "auto"})) == 0.0
