"""Proves: what replicas log of their start is shown for each of them, and nothing else of it."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.cli.terminal import Terminal
from cluster.worker.loading import up


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
