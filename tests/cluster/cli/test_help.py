"""Proves: every command's help is the one in golden/, and the flag of each setting says what it is.

`python -m tests.cluster.cli.test_help` writes golden/ anew; look at what changed, and know why.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.flags import flags_of
from cluster.cli.main import main

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = (
    *("serve", "generate", "chat", "status", "demo"),
    *("verify", "plan", "bench", "simulate", "train-drafter"),
    *("keys", "keys add", "keys list", "keys remove"),
)


def help_of(command: str) -> str:
    args = [*command.split(), "--help"]
    result = CliRunner().invoke(main, args, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.output


def golden(command: str) -> Path:
    return GOLDEN / f"{command.replace(' ', '_')}.txt"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_as_it_was(command: str) -> None:
    assert help_of(command) == golden(command).read_text()


def test_every_flag_of_a_setting_says_what_it_is() -> None:
    flags = flags_of(["", "replica", "scheduler", "server", "auth"])
    assert len({flag.name for flag in flags}) == len(flags)
    assert [flag.name for flag in flags if not flag.help()] == []


if __name__ == "__main__":
    for each in COMMANDS:
        golden(each).write_text(help_of(each))
