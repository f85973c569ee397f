"""Proves: `serve` says that it serves with the first replica, and in one line why it does not; and
what replicas log of their start is shown for each of them, and nothing else of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from cluster import run as cluster_run
from cluster.cli import serve as cli_serve
from cluster.cli.serve import Terminal
from cluster.config_sources import from_args
from cluster.run import StartFailed
from cluster.worker.loading import up

LOOKS = 5


class Cluster:
    """A ClusterRun whose Serve says what it is told to say; it fails after five looks."""

    updates = False
    all_up = False
    replicas_up = 1

    def __init__(self, _config: object) -> None:
        self.stopped: list[bool] = []
        self.deploy_after: list[bool] = []

    def deploy(self, tell: object, join_ray: bool, replace: bool) -> None:
        assert tell is None, "verbose"
        assert not replace
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


LATE = "not up within 3 s (actors.start_s); replica: 0 up (No GPU.)\n"
UPDATE = {"updates": True, "ready": False}
SERVES = (0, [False])


@pytest.mark.parametrize(
    ("settings", "state", "said", "ends"),
    [
        ({"replicas": 2}, {}, " on 1 of 2 replica(s):", SERVES),
        ({"replicas": 2}, {"replicas_up": 2}, " on 2 of 2 replica(s):", SERVES),
        # Serve learns of a replica a moment after the pool.
        ({}, {"replicas_up": 0}, " on 1 of 1 replica(s):", SERVES),
        ({"autoscaling": {"max_replicas": 2}}, {}, " on 1 of 1 to 2 replica(s):", SERVES),
        # With no replica to wait for it serves when the frontend is up.
        (
            *(ZERO, {"ready": False, "all_up": True, "replicas_up": 0}),
            *(" on 0 of 0 to 2 replica(s):", SERVES),
        ),
        ({}, {"ready": False}, f"Lockstep did not start: {LATE}", (1, [True])),
        # Serve believes in a replica that the pool does not have.
        (
            *({}, {"ready": False, "all_up": True}),
            *(f"Lockstep did not start: {LATE}", (1, [True])),
        ),
        (ZERO, {"ready": False}, f"Lockstep did not start: {LATE}", (1, [True])),
        # Requests may wait for the first replica of what is there.
        ({}, UPDATE, f"The update failed, and what there is stays: {LATE}", (1, [])),
        # Where one of them serves, an update that comes to no end leaves it in place.
        ({}, {"updates": True}, f"The update is not complete: {LATE}Lockstep serves", SERVES),
    ],
)
def test_it_serves_with_the_first_replica_or_says_in_one_line_why_not(
    settings: dict[str, Any],
    state: dict[str, Any],
    said: str,
    ends: tuple[int, list[bool]],
    serve: Serve,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, cluster = serve(settings, **state)
    out = capsys.readouterr().out
    assert said in out
    assert ("Lockstep serves" in out) == (ends == SERVES)
    assert (status, cluster.stopped) == ends


def logged(pid: int, *lines: str, ip: str = "192.0.2.1") -> dict[str, Any]:
    """As Ray brings it."""
    return {
        "ip": ip,
        "pid": pid,
        "lines": [f"INFO 2030-01-01 12:00:00,000 {line}" for line in lines],
    }


def test_each_change_of_a_replicas_stage_is_a_line(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal(verbose=False)
    terminal.say_start()
    assert terminal.tell == terminal.take
    terminal.take(logged(7, "lockstep.start loads demo", "lockstep.replica a: b", "else"))
    terminal.take(logged(7, "lockstep.start loads demo"))
    terminal.take(logged(9, "lockstep.start is up", ip="192.0.2.2"))
    with caplog.at_level("INFO", "lockstep.start"):
        up("suffix, eagle3")
        up("suffix, eagle3; 1 % right.")
    terminal.take(logged(7, *(f"{record.name} {record.message}" for record in caplog.records)))
    start, logs, *stages = capsys.readouterr().err.splitlines()
    assert (start, "session_latest/logs" in logs) == ("Ray and Serve start ...", True)
    assert stages == [
        "replica 1 (pid 7, ip 192.0.2.1) loads demo",
        "replica 2 (pid 9, ip 192.0.2.2) is up",
        "replica 1 (pid 7, ip 192.0.2.1) is up",
        "replica 1 (pid 7, ip 192.0.2.1) drafts badly, 1 % right. It serves all the same.",
        "replica 1 (pid 7, ip 192.0.2.1) is up",
    ]
