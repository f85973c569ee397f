"""Proves: only our own lines reach the terminal, all others the file that is named; and what
replicas log of their start is shown for each of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cluster.cli.terminal import Stages, Terminal
from cluster.worker.loading import UP, up

PREFIX = "\x1b[36m(ServeReplica:lockstep:replica pid={})\x1b[0m INFO 2030-01-01 12:00:00,000 "


def line(process: str, text: str) -> str:
    return f"{PREFIX.format(process)}{text}\n"


def test_what_others_print_goes_to_the_file(capfd: pytest.CaptureFixture[str]) -> None:
    with Terminal(verbose=False) as terminal:
        os.write(1, b"by Python\n")
        os.write(2, b"by C++\n")
        subprocess.run([sys.executable, "-c", "print('by a child')"], check=True)
        terminal.say("ours")
        assert terminal.log is not None
        kept = terminal.log
    print("after")
    out, err = capfd.readouterr()
    assert out == "after\n"
    assert err.splitlines() == [
        f"Lines of Ray and Serve go to {kept}; --verbose shows them here.",
        "ours",
    ]
    assert set(kept.read_text().splitlines()) == {"by Python", "by C++", "by a child"}
    kept.unlink()


def test_verbose_leaves_everything_here(capfd: pytest.CaptureFixture[str]) -> None:
    with Terminal(verbose=True) as terminal:
        print("by Python")
        terminal.say("ours")
        assert terminal.log is None
    assert capfd.readouterr() == ("by Python\n", "ours\n")


def test_progress_is_a_line_for_each_change_where_there_is_no_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Terminal(verbose=False) as terminal, terminal.progress("2 replicas start") as look:
        os.write(2, line("7", "lockstep.start loads demo").encode() + b"half a li")
        look()
        os.write(2, b"ne\n" + line("9", "lockstep.start is up").encode())
        look()
        look()
        assert terminal.log is not None
        terminal.log.unlink()
    said = capfd.readouterr().err.splitlines()
    assert said[1:] == [
        *("2 replicas start ...", "replica 1 (pid 7) loads demo", "replica 2 (pid 9) is up"),
    ]


def test_the_last_stage_of_each_replica_counts_and_other_lines_do_not() -> None:
    stages = Stages()
    assert stages.read(line("1, ip=192.0.2.1", "lockstep.start loads a")) == [
        "replica 1 (pid 1, ip 192.0.2.1) loads a"
    ]
    said = stages.read(line("2", "lockstep.start loads a") + line("2", "lockstep.replica a: b"))
    assert said == ["replica 2 (pid 2) loads a"]
    assert stages.read("(PoolProcess pid=1) INFO lockstep.start is up\n") == []
    assert stages.read(line("2", "lockstep.start reads weights: 40 %")) == [
        "replica 2 (pid 2) reads weights: 40 %"
    ]
    assert list(stages.of.values()) == ["loads a", "reads weights: 40 %"]


@pytest.mark.parametrize(("drafter", "lines"), [("", 1), ("eagle3", 1), ("eagle3, 1 % right", 2)])
def test_what_is_wrong_with_a_drafter_stays_on_the_terminal(
    drafter: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "lockstep.start"):
        up(drafter)
    stages = Stages()
    said = stages.read("".join(line("1", f"{one.name} {one.message}") for one in caplog.records))
    assert (len(said), list(stages.of.values())) == (lines, [UP])
    assert all(one.endswith(UP) for one in said)
    assert lines == 1 or "1 % right" in said[0]
