"""Proves: `make setup` takes a Python that the packages have wheels for, though `python3` is an
older one; where there is none it says which is needed, before anything is installed.

The Pythons are scripts that say which version they are and note what they are asked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Runs what `-c` has as that version; makes a venv of itself; installs nothing.
STUB = f"""#!/bin/bash
echo "{{version}} $*" >> "{{notes}}"
case "$1 $2" in
    "-c "*) exec "{sys.executable}" -c 'import sys; sys.version_info = ({{digits}}, 0)
for name in {{without}}: sys.modules[name] = None
exec(sys.argv[1])' "$2" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
"""


def stub(path: Path, version: str, notes: Path, without: tuple[str, ...] = ()) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    digits = version.replace(".", ", ")
    path.write_text(
        STUB.format(version=version, notes=notes, digits=digits, without=json.dumps(without))
    )
    path.chmod(0o755)


class Machine:
    """A checkout, and a PATH with make and with these Pythons alone."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin, self.notes = folder / "checkout", folder / "bin", folder / "notes"
        for each in (self.checkout, self.bin):
            each.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.checkout)
        for tool in ("make", "mkdir", "cp", "touch"):
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)

    def has(self, name: str, version: str, *without: str) -> None:
        stub(self.bin / name, version, self.notes, without)

    def setup(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        self.notes.write_text("")
        environment = {name: text for name, text in os.environ.items() if "MAKE" not in name}
        return subprocess.run(
            ["make", "setup", *arguments],
            cwd=self.checkout,
            env=environment | {"PATH": str(self.bin)},
            capture_output=True,
            text=True,
            check=False,
        )

    def installed_with(self) -> set[str]:
        """Versions of Python that were asked for a venv or for pip."""
        return {line.split()[0] for line in self.notes.read_text().splitlines() if " -m " in line}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        ({"python3": "3.10", "python3.12": "3.12"}, "3.12"),
        ({"python3": "3.15", "python3.13": "3.13"}, "3.13"),
        ({"python3": "3.12", "python3.11": "3.11"}, "3.12"),
        ({"python3": "3.14"}, "3.14"),
        ({"python3.14": "3.14"}, "3.14"),
    ],
)
def test_a_supported_python_is_taken(machine: Machine, pythons: dict[str, str], taken: str) -> None:
    for name, version in pythons.items():
        machine.has(name, version)
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert machine.installed_with() == {taken}
    assert machine.setup().returncode == 0
    assert machine.installed_with() == set(), "all is there"


def test_one_without_venv_is_passed_over(machine: Machine) -> None:
    machine.has("python3", "3.11", "ensurepip")
    machine.has("python3.12", "3.12")
    assert machine.setup().returncode == 0
    assert machine.installed_with() == {"3.12"}


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.15", None])
def test_without_one_nothing_is_installed(machine: Machine, version: str | None) -> None:
    if version is not None:
        machine.has("python3", version)
    done = machine.setup()
    assert done.returncode != 0
    assert "setup: needs a CPython of 3.11 3.12 3.13 3.14 with venv" in done.stderr
    assert machine.installed_with() == set()
    assert not (machine.checkout / ".venv").exists()


def test_one_that_is_named_is_the_only_one_that_may_be_taken(machine: Machine) -> None:
    machine.has("python3", "3.11")
    machine.has("mine", "3.12")
    machine.has("old", "3.10")
    assert "here: old\n" in machine.setup("PYTHON=old").stderr
    assert machine.installed_with() == set()
    assert machine.setup("PYTHON=mine").returncode == 0
    assert machine.installed_with() == {"3.12"}


@pytest.mark.parametrize(("version", "without"), [("3.10", ()), ("3.11", ("pip",))])
def test_an_environment_that_does_not_do_is_named(
    machine: Machine, version: str, without: tuple[str, ...]
) -> None:
    """Of an older Python, or one that was left half made."""
    stub(machine.checkout / ".venv/bin/python", version, machine.notes, without)
    machine.has("python3", "3.11")
    done = machine.setup()
    assert done.returncode != 0
    assert "`make clean` removes it" in done.stderr
    assert machine.installed_with() == set()


def test_the_oldest_one_is_that_of_the_package() -> None:
    [supported] = re.findall(r"^SUPPORTED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={supported.split()[0]}"
