"""Proves: what replicas log of their start is shown for each of them, and nothing else of it."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.cli.terminal import Terminal
from cluster.worker.loading import up


def logged(pid: int, *lines: str, ip: str = "192.0.2.1") -> dict[str, Any]:
    """As Ray brings it."""
    return {"ip": ip, "pid": pid, "lines": [f"INFO 2030-01-01 12:00:00,000 {one}" for one in lines]}


def test_progress_is_a_line_for_each_change_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = Terminal(verbose=False)
    assert terminal.tell == terminal.take
    with terminal.progress("2 replicas start"):
        terminal.take(logged(7, "lockstep.start loads demo", "lockstep.replica a: b", "else"))
        terminal.take(logged(7, "lockstep.start loads demo"))
        terminal.take(logged(9, "lockstep.start is up", ip="192.0.2.2"))
        terminal.take(logged(7, "lockstep.start reads weights: 40 %"))
    assert capsys.readouterr() == (
        "",
        "2 replicas start ...\nreplica 1 (pid 7) loads demo\n"
        "replica 2 (pid 9, ip 192.0.2.2) is up\n"
        "replica 1 (pid 7, ip 192.0.2.1) reads weights: 40 %\n",
    )


def test_a_terminal_shows_the_last_stage_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    terminal = Terminal(verbose=False)
    with terminal.console.capture() as seen, terminal.progress("2 replicas start"):
        terminal.take(logged(7, "lockstep.start loads demo"))
        terminal.take(logged(7, "lockstep.start is up"))
        terminal.take(logged(9, "lockstep.start reads weights: 40 %"))
    said = seen.get()
    assert "replica 1 (pid 7) is up" in said
    assert "replica 2 (pid 9) reads weights: 40 %" in said
    assert "loads demo" not in said


@pytest.mark.parametrize(("drafter", "lines"), [("", 1), ("eagle3", 1), ("eagle3, 1 % right", 2)])
def test_what_is_wrong_with_a_drafter_stays_on_the_terminal(
    drafter: str,
    lines: int,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with caplog.at_level("INFO", "lockstep.start"):
        up(drafter)
    terminal = Terminal(verbose=False)
    terminal.take(logged(1, *(f"{one.name} {one.message}" for one in caplog.records)))
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert lines == 1 or "1 % right" in said[0]
