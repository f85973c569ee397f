"""Proves: `serve` says that it serves with the first replica, and in one line why it does not."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from cluster import run as cluster_run
from cluster.cli import serve as cli_serve
from cluster.cli.terminal import Terminal
from cluster.config_sources import from_args
from cluster.run import StartFailed

LOOKS = 5


class Cluster:
    """A ClusterRun whose Serve says what it is told to say; it fails after five looks."""

    updates = False
    all_up = False
    replicas_up = 1

    def __init__(self, _config: object) -> None:
        self.stopped: list[bool] = []
        self.deploy_after: list[bool] = []

    def deploy(self, tell: object, join_ray: bool) -> None:
        assert tell is None, "verbose"
        assert join_ray
        assert self.deploy_after, "the key is still in the command line"

    def wait_until(self, done: Callable[[bool], bool], _sleep: object) -> None:
        for _ in range(LOOKS):
            if done(self.all_up):
                return
        raise StartFailed("not up within 3 s (actors.start_s); replica: 0 up (No GPU.)")

    def stop(self, at_once: bool = False) -> None:
        self.stopped.append(at_once)


class Answers:
    """A Client of a server that is ready, or not."""

    ready_now = True

    def __init__(self, _address: str) -> None: ...

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_exc: object) -> None: ...

    def ready(self) -> bool:
        return self.ready_now


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Cluster]]:
    """Runs `serve`, which is told to stop as soon as it serves."""

    def run(settings: dict[str, Any], **said: Any) -> tuple[int, Cluster]:
        cluster = Cluster(None)
        for name, value in said.items():
            if name != "ready":
                setattr(cluster, name, value)
        monkeypatch.setattr(Answers, "ready_now", said.get("ready", True))
        monkeypatch.setattr(cluster_run, "ClusterRun", lambda _config: cluster)
        hidden: list[bool] = []
        monkeypatch.setattr(cli_serve, "hide_key", lambda: hidden.append(True))
        # Ray reads the command line.
        cluster.deploy_after = hidden
        return cli_serve.serve_until_signal(from_args(settings), verbose=True), cluster

    handlers: dict[int, Any] = {}

    def say(_terminal: Terminal, text: str) -> None:
        print(text)
        if "Ctrl-C stops it" in text:
            handlers[signal.SIGTERM](signal.SIGTERM, None)

    monkeypatch.setattr(Terminal, "say", say)
    monkeypatch.setattr(cli_serve, "Client", Answers)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    return run


Serve = Callable[..., tuple[int, Cluster]]
ZERO = {"autoscaling": {"min_replicas": 0, "max_replicas": 2}}


@pytest.mark.parametrize(
    ("settings", "state", "said"),
    [
        ({"replicas": 2}, {}, "on 1 of 2 replica(s):"),
        ({"replicas": 2}, {"replicas_up": 2}, "on 2 of 2 replica(s):"),
        # Serve learns of a replica a moment after the pool.
        ({}, {"replicas_up": 0}, "on 1 of 1 replica(s):"),
        ({"autoscaling": {"max_replicas": 2}}, {}, "on 1 of 1 to 2 replica(s):"),
        # With no replica to wait for it serves when the frontend is up.
        (ZERO, {"ready": False, "all_up": True, "replicas_up": 0}, "on 0 of 0 to 2 replica(s):"),
    ],
)
def test_it_serves_with_the_first_replica_and_says_how_many_there_are(
    settings: dict[str, Any],
    state: dict[str, Any],
    said: str,
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, cluster = serve(settings, **state)
    assert said in capsys.readouterr().out
    assert (status, cluster.stopped) == (0, [False])


@pytest.mark.parametrize(
    ("settings", "state", "said", "stopped"),
    [
        ({}, {}, "Lockstep did not start", [True]),
        # Serve believes in a replica that the pool does not have.
        ({}, {"all_up": True}, "Lockstep did not start", [True]),
        (ZERO, {}, "Lockstep did not start", [True]),
        # Requests may wait for the first replica of what is there.
        ({}, {"updates": True}, "The update failed, and what there is stays", []),
    ],
)
def test_what_does_not_start_is_one_line_and_an_exit_status(
    settings: dict[str, Any],
    state: dict[str, Any],
    said: str,
    stopped: list[bool],
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, cluster = serve(settings, ready=False, **state)
    line = "not up within 3 s (actors.start_s); replica: 0 up (No GPU.)"
    assert capsys.readouterr().out.splitlines()[-1] == f"{said}: {line}"
    assert (status, cluster.stopped) == (1, stopped)


def test_an_update_that_does_not_come_to_its_end_leaves_in_place_what_serves(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    status, cluster = serve({}, updates=True)
    first, second = capsys.readouterr().out.splitlines()[2:4]
    assert first == (
        "The update is not complete: not up within 3 s (actors.start_s); replica: 0 up (No GPU.)"
    )
    assert second.startswith("Lockstep serves")
    assert (status, cluster.stopped) == (0, [False])
