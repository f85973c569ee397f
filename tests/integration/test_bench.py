"""Proves: `lockstep bench` measures a real cluster, open loop, with the pool's own figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import main
from tests.chaos.hosted import HostedCluster

pytestmark = pytest.mark.ray


def test_a_benchmark_of_a_real_cluster(cluster: HostedCluster, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    arguments = [
        *("bench", "--address", cluster.address, "--prompt-tokens", "8..40", "--requests", "24"),
        *("--rate", "40", "--warm-up", "2", "--max-new-tokens", "24", "--json", str(path)),
        # Else it is the pool's choice, by this machine's times, whether anything is drafted.
        *("--draft-len", "2"),
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    figures = data["figures"]
    assert (figures["requests"], figures["failed"], figures["new_tokens"]) == (24, 0, 24 * 24)
    assert figures["elapsed_s"] > data["requests"][-1]["due_s"] > 0
    assert figures["latency_s"]["p50"] >= figures["ttft_s"]["p50"] > 0
    assert 0 < figures["acceptance"] <= 1
    assert 0 <= figures["padding"] < 1
    assert figures["spread_mean"] >= 0
    assert data["settings"]["replicas"] == 2


def test_a_comparison_is_of_the_models_that_the_cluster_serves(
    cluster: HostedCluster, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    arguments = [
        *("bench", "--address", cluster.address, "--prompt-tokens", "8..20", "--requests", "4"),
        *("--warm-up", "0", "--max-new-tokens", "8", "--json", str(path), "--device", "cpu"),
        *("--compare", "--rounds", "1", "--compare-prompts", "2", "--batch-size", "2"),
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    pair = cluster.config.replica
    assert data["settings"]["compared"] == (
        f"{pair.target}, drafter draft_model {pair.draft}, float32 on cpu"
    )
    ways = {each["name"]: each for each in data["comparison"]["contenders"]}
    assert ways["Lockstep, batch 2"]["identical"] == 2
    assert ways["transformers generate, batch 1"]["tokens_per_s"][0] > 0
