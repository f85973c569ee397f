"""Proves: a plan reads no weights, says what fits, and refuses with the least that would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli import main
from cluster.cli_plan import size
from replicas.config import ReplicaConfig
from replicas.replica import Replica
from tests.replicas.test_pair import WORDS, save_model

RUN = CliRunner()


def plan(*args: str, code: int = 0) -> Any:
    result = RUN.invoke(main, ["plan", "--device", "cpu", "--json", *args])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_a_plan_is_what_a_replica_of_the_demo_pair_loads() -> None:
    planned = plan("--memory", "100MiB", "--draft-len", "3")
    config = ReplicaConfig(device="cpu", memory="100MiB", plan_draft_len=3)
    spec = Replica.load(config).spec
    assert spec.kv_blocks == planned["kv"]["blocks"]
    assert planned["total_bytes"] <= planned["budget_bytes"] == 100 * 1024 * 1024
    parts = planned["kv"]["bytes"] + planned["buffers_bytes"]["total"]
    assert planned["total_bytes"] == parts + sum(planned["weights_bytes"].values())
    assert planned["sequences"]["1024"] == planned["kv"]["blocks"] // 64


def test_a_pair_without_its_weights_can_be_planned(tmp_path: Path) -> None:
    target = save_model(tmp_path / "t", WORDS, vocab_size=8)
    for weights in (tmp_path / "t").glob("*.safetensors"):
        weights.unlink()
    planned = plan("--target", target, "--draft", "null", "--memory", "20 MB")
    assert planned["weights_bytes"]["draft"] == 0
    assert planned["fits"]["draft_len"] == 0


def test_a_gpu_that_is_not_here_can_be_planned_for() -> None:
    sizes = ("--target", "planted:qwen3-8b", "--draft", "planted:qwen3-0.6b")
    args = ("--device", "cuda", "--dtype", "bfloat16", "--context-len", "8192")
    planned = plan(*sizes, *args, "--memory", "24GiB")
    assert planned["device"] == "cuda"
    assert 8.1e9 < planned["weights_bytes"]["target"] / 2 < 8.3e9
    assert planned["sequences"]["8192"] >= 2
    short = plan(*sizes, *args, "--memory", "18GiB", code=1)
    assert short["fits"] is None
    assert plan(*sizes, *args, "--memory", str(short["least_bytes"]))["fits"]["rows"] == 1


def test_a_rank_has_its_part_of_the_target_and_of_the_kv_cache() -> None:
    sizes = ("--target", "planted:qwen3-8b", "--draft", "null", "--memory", "24GiB")
    args = ("--device", "cuda", "--dtype", "bfloat16", "--context-len", "8192")
    whole = plan(*sizes, *args)
    rank = plan(*sizes, *args, "--tensor-parallel", "4")
    assert (whole["tensor_parallel"], rank["tensor_parallel"]) == (1, 4)
    # The embedding is on every rank: 1.24 of its 16.4 GB.
    parts = 4 * rank["weights_bytes"]["target"] - whole["weights_bytes"]["target"]
    assert 3.6e9 < parts < 3.9e9
    assert 4 * rank["kv"]["block_bytes"] == whole["kv"]["block_bytes"]
    assert rank["sequences"]["8192"] > 8 * whole["sequences"]["8192"]
    shown = RUN.invoke(main, ["plan", *sizes, *args, "--tensor-parallel", "4"])
    assert "each of 4 ranks" in shown.stdout


def test_a_target_that_so_many_ranks_cannot_share_is_refused() -> None:
    refused = RUN.invoke(main, ["plan", "--device", "cpu", "--tensor-parallel", "5"])
    assert refused.exit_code == 2
    assert "tensor_parallel: num_attention_heads is" in refused.stderr


def test_too_little_names_the_least_on_the_terminal_too() -> None:
    result = RUN.invoke(main, ["plan", "--device", "cpu", "--memory", "30MiB"])
    assert result.exit_code == 1
    assert "30 MiB do not hold the weights (28 MiB)" in result.output
    assert "MiB would, or a smaller context_len" in result.output


def test_the_table_shows_what_was_wanted_where_less_fits() -> None:
    result = RUN.invoke(main, ["plan", "--device", "cpu", "--memory", "80MiB"])
    assert result.exit_code == 0
    assert "weights of the target" in result.output
    assert "Wanted: 8 rows, draft length 8" in result.output


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--memory", "much"], "replica.memory"),
        (["--context-len", "4096"], "context_len: 4096 is over"),
        (["--target", "/nowhere"], "/nowhere"),
    ],
)
def test_a_wrong_option_is_named(args: list[str], named: str) -> None:
    result = RUN.invoke(main, ["plan", "--device", "cpu", *args])
    assert result.exit_code == 2
    assert named in result.output


def test_sizes_are_for_people() -> None:
    assert [size(count) for count in (5, 2048, 3 << 20, 5 << 30)] == [
        "5 B",
        "2.0 KiB",
        "3.0 MiB",
        "5.00 GiB",
    ]
