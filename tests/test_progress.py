"""Proves: `tests.progress` (`make test`) says how far a part is while it runs, shows once what
failed, ends as pytest ends, with all counts, and waits for no process that a test left behind. A
part that breaks off, hangs or collects nothing is an error.

The parts are small files of tests in a folder of their own. What waits, waits for a named pipe.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GOOD = "def test_good(): pass\n"
BAD = "def test_bad(): assert not 'seen once'\n"
SKIPPED = "import pytest\n\ndef test_skipped(): pytest.skip('no such thing')\n"
BROKEN = "import pytest\n\n@pytest.fixture\ndef no(): 1 / 0\n\ndef test_broken(no): pass\n"
WAITS = "def test_waits(): open('gate').read()\n"
LEAVES = """
import subprocess, sys

def test_leaves():
    subprocess.Popen([sys.executable, '-c', "open('gate').read()"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "gate")
    return tmp_path


@contextmanager
def begun(folder: Path, files: dict[str, str], *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run with one part for each file."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    parts = [f"{name}: test_{name}.py" for name in files]
    with subprocess.Popen(
        # Whatever is wrong with it, it ends.
        [sys.executable, "-m", "tests.progress", "--limit-s", "100", *options, *parts],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        except BaseException:
            process.terminate()
            raise


def read_until(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    assert any(line.startswith(beginning) for line in process.stdout), "never told"


def ended(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    with begun(folder, files, *options) as process:
        out, _ = process.communicate(timeout=100)
    return process.returncode, out


def test_the_end_counts_all_and_shows_what_failed_once(folder: Path) -> None:
    files = {"mixed": GOOD + BAD + SKIPPED, "whole": GOOD, "broken": GOOD + BROKEN}
    status, out = ended(folder, files, "--left-out", "some")
    assert status == 1
    assert "\nwhole: 1 passed in " in out
    assert out.count("def test_bad") == out.count("1 / 0") == 1
    for line in (
        "FAILED test_mixed.py::test_bad",
        "ERROR test_broken.py",
        "SKIPPED [1] test_mixed",
    ):
        assert out.count(f"\n{line}") == 1
    assert "\nleft out: tests marked some\n" in out
    assert out.splitlines()[-1].startswith("===== 1 failed, 3 passed, 1 skipped, 1 error in ")


def test_without_failures_the_exit_status_is_0(folder: Path) -> None:
    status, out = ended(folder, {"whole": GOOD})
    assert status == 0
    assert out.splitlines()[-1].startswith("===== 1 passed in ")


def test_how_far_a_part_is_is_told_while_it_runs(folder: Path) -> None:
    """It ends only after that was told."""
    with begun(folder, {"slow": BAD + GOOD + WAITS}, "--every-s", "0.01") as process:
        read_until(process, "slow: 2 of 3 tests, 1 failed, ")
        (folder / "gate").write_text("")
        read_until(process, "===== 1 failed, 2 passed in ")


def test_a_process_that_a_test_left_behind_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the part's output, and ends only after the run has."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-s")
    status, out = ended(folder, {"leaves": LEAVES})
    assert (status, "===== 1 passed in " in out) == (0, True)
    (folder / "gate").write_text("")


@pytest.mark.parametrize(
    ("text", "said", "shown"),
    [
        (GOOD + "def test_dies(): import os; os._exit(9)", "1 passed, 1 error", "collected 2"),
        (GOOD + "def test_leaves(): import os; os._exit(0)", "1 passed, 1 error", "collected 2"),
        ("1 / 0", "1 error", "    1 / 0"),
        ("", "1 error", "collected 0 items"),
    ],
    ids=["dies", "leaves", "not imported", "no tests"],
)
def test_a_part_that_broke_off_is_an_error_and_shows_all_of_it(
    folder: Path, text: str, said: str, shown: str
) -> None:
    status, out = ended(folder, {"part": text})
    assert status == 1
    assert out.count(f"\n{shown}") == 1
    assert f"===== {said} in " in out


def test_a_part_that_hangs_is_interrupted(folder: Path) -> None:
    status, out = ended(folder, {"hangs": WAITS}, "--limit-s", "1")
    assert status == 1
    assert "\nhangs: not done within 1 s\n" in f"\n{out}"
    assert "===== 1 error in " in out


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_its_parts(folder: Path, how: signal.Signals) -> None:
    with begun(folder, {"waits": GOOD + WAITS}, "--every-s", "0.01") as process:
        read_until(process, "waits: 1 of 2 tests")
        process.send_signal(how)
        read_until(process, "interrupted")
    assert process.returncode == 130
    with pytest.raises(OSError, match="No such device"):  # nobody waits at the gate
        os.open(folder / "gate", os.O_WRONLY | os.O_NONBLOCK)
