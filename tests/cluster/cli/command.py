"""The command `lockstep` in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from cluster.cli.main import main


def lockstep(*arguments: str, code: int = 0) -> str:
    """What it prints; it must end with this status."""
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    return result.output
