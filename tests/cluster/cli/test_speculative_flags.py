"""Proves: what drafts is said in the same words to every command that drafts, by a flag or by a
file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from cluster import verify
from cluster.bench import session
from cluster.cli import plan, serve
from cluster.cli.main import main
from replicas.config import ReplicaConfig, SpeculativeConfig

Run = Callable[..., tuple[Result, list[ReplicaConfig]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command, up to where it would load the replica of these settings."""
    used: list[ReplicaConfig] = []

    def end(config: Any) -> None:
        used.append(getattr(config, "replica", config))
        raise typer.Exit

    monkeypatch.setattr(serve, "serve_until_signal", lambda config, *_: end(config))
    monkeypatch.setattr(verify, "verify", lambda _, config, *__: end(config))
    monkeypatch.setattr(session, "engine", lambda config, _: end(config))
    monkeypatch.setattr(plan, "print_plan", lambda config, _: end(config))
    (tmp_path / "prompts").write_text('{"prompt": "x"}\n')
    more = {"verify": ["--prompts", str(tmp_path / "prompts")], "bench": ["--engine"]}

    def invoke(command: str, *flags: str) -> tuple[Result, list[ReplicaConfig]]:
        return CliRunner().invoke(main, [command, *more.get(command, []), *flags]), used

    return invoke


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("serve", {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}),
        ("verify", {"method": "none"}),
        ("bench", {"method": "eagle3", "model": "planted:head"}),
        ("plan", {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 8}),
    ],
)
def test_a_command_drafts_by_what_a_flag_says_or_else_a_file(
    command: str, said: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("target: x/y\nspeculative: {method: suffix, num_speculative_tokens: 3}\n")
    for flags in (("--speculative-config", json.dumps(said)), ()):
        result, used = run(command, "--config", str(path), *flags)
        assert result.exit_code == 0, result.output
    of_the_file = SpeculativeConfig(method="suffix", num_speculative_tokens=3)
    assert [one.drafting for one in used] == [SpeculativeConfig(**said), of_the_file]


def test_the_word_none_is_the_method_and_null_the_default(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    for text in ("speculative: none", "replica: {speculative: none}", "speculative: null"):
        path.write_text(f"target: x/y\n{text}\n")
        assert run("serve", "--config", str(path))[0].exit_code == 0
    for word in ("none", "null"):
        run("serve", "x/y", "--speculative-config", word)
    _, used = run("serve", "x/y", "--draft", "null")
    methods = ["none", "none", "suffix", "none", "suffix", "none"]
    assert [one.drafting.method for one in used] == methods
