"""Proves: a plan is that of the replica which the same settings load, says what fits, and refuses
with the least that would do.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cluster.cli.main import main
from cluster.cli.plan import planned_of
from cluster.config_sources import from_args, from_file
from cluster.worker import resources
from replicas import pair as pair_module
from replicas.memory import MemoryPlan, plan_memory
from replicas.replica import Replica
from tests import tiny_pairs  # noqa: F401  (what attends on a CPU where passes are recorded)
from tests.cluster.cli.command import lockstep

FILE = """
replica:
  target: planted:tiny?scale=0.65&layers=2
  speculative_config: {method: draft_model, model: "planted:tiny-draft"}
  device: cpu
  dtype: bfloat16
  memory: 100MiB
  deterministic: true
  graphs: "on"
  block_size: 8
  context_len: 512
  prefill_chunk_tokens: 96
  calibrate: false
scheduler: {rows_max: 4, draft_len_max: 5, prefill_rows_max: 3}
"""
DRAFTER = json.dumps({"method": "draft_model", "model": "planted:qwen3-0.6b"})
SERVE_FILE = """
applications:
  - name: lockstep
    import_path: cluster.app:build
    args:
      replicas: 3
      replica: {num_gpu_blocks_override: 100, device: cpu, calibrate: false}
      scheduler: {rows_max: 2}
"""


def plan(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(main, ["plan", "--json", *args])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


class PlannedError(Exception):
    """The replica has its plan, and would go on loading."""


def made_by_a_replica(path: Path, loads: bool, monkeypatch: pytest.MonkeyPatch) -> MemoryPlan:
    """The plan of the replica that `serve --config` would start, which it keeps to once loaded."""
    made: list[MemoryPlan] = []

    def noting(*args: Any, **options: Any) -> MemoryPlan:
        made.append(plan_memory(*args, **options))
        if not loads:
            raise PlannedError
        return made[-1]

    monkeypatch.setattr(pair_module, "plan_memory", noting)
    with nullcontext() if loads else pytest.raises(PlannedError):
        spec = Replica.load(resources.replica_config(from_file(path))).spec
        assert spec.kv_blocks == made[-1].kv_blocks
    (one,) = made
    return one


@pytest.mark.parametrize(("text", "loads"), [(FILE, False), (SERVE_FILE, True)])
def test_a_plan_of_a_file_is_that_of_the_replica_that_serves_it(
    text: str, loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    planned, made = plan("--config", str(path)), made_by_a_replica(path, loads, monkeypatch)
    assert planned["wanted"] == asdict(made.wanted)
    assert planned["fits"] == asdict(made.work)
    assert planned["kv"] == {
        "blocks": made.kv_blocks,
        "block_size": made.work.block_size,
        "block_bytes": made.block_bytes,
        "bytes": made.kv_bytes,
        "groups": [],
    }
    total = {"total": made.buffers.total}
    assert planned["buffers_bytes"] == json.loads(json.dumps(asdict(made.buffers) | total))
    assert (planned["total_bytes"], planned["least_bytes"]) == (made.total, made.least)
    assert planned["budget_bytes"] == made.budget


@pytest.mark.parametrize(
    ("gpus", "said", "share"), [(0.5, None, 0.5), (1, None, None), (0.5, 0.3, 0.3)]
)
def test_a_part_of_a_gpu_is_planned_for_where_replicas_share_one(
    gpus: float, said: float | None, share: float | None
) -> None:
    config = from_args(
        {"actors": {"replica_gpus": gpus}, "replica": {"gpu_memory_utilization": said}}
    )
    assert planned_of(config).gpu_memory_utilization == share


def test_a_gpu_that_is_not_here_can_be_planned_for() -> None:
    sizes = ("--target", "planted:qwen3-8b", "--speculative-config", DRAFTER)
    args = ("--device", "cuda", "--dtype", "bfloat16", "--context-len", "8192")
    planned = plan(*sizes, *args, "--memory", "24GiB", "--plan-rows", "2", "--plan-draft-len", "3")
    assert planned["device"] == "cuda"
    assert (planned["wanted"]["rows"], planned["wanted"]["draft_len"]) == (2, 3)
    assert 8.1e9 < planned["weights_bytes"]["target"] / 2 < 8.3e9
    assert planned["sequences"]["8192"] >= 1
    short = plan(*sizes, *args, "--memory", "18GiB", code=1)
    assert short["fits"] is None
    assert plan(*sizes, *args, "--memory", str(short["least_bytes"]))["fits"]["rows"] >= 1


def test_a_rank_has_its_part_of_the_target_and_of_the_kv_cache() -> None:
    sizes = ("--target", "planted:qwen3-8b", "--speculative-config", "none", "--memory", "24GiB")
    args = ("--device", "cuda", "--dtype", "bfloat16", "--context-len", "8192")
    whole = plan(*sizes, *args)
    rank = plan(*sizes, *args, "--tensor-parallel", "4")
    assert (whole["tensor_parallel"], rank["tensor_parallel"]) == (1, 4)
    # The embedding is on every rank: 1.24 of its 16.4 GB.
    parts = 4 * rank["weights_bytes"]["target"] - whole["weights_bytes"]["target"]
    assert 3.6e9 < parts < 3.9e9
    assert 4 * rank["kv"]["block_bytes"] == whole["kv"]["block_bytes"]
    assert rank["sequences"]["8192"] > 8 * whole["sequences"]["8192"]
    assert "each of 4 ranks" in lockstep("plan", *sizes, *args, "--tensor-parallel", "4")


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--memory", "30MiB"], 1, ["30 MiB do not hold the weights (28 MiB)", "MiB would, or"]),
        (["--memory", "80MiB"], 0, ["Wanted: 32 rows, draft length 8"]),
        (
            ["--memory", "100MiB", "--dtype", "bfloat16", "--deterministic"],
            *(0, ["bfloat16 on cpu, deterministic", "weights of the target"]),
        ),
    ],
)
def test_the_terminal_says_what_fits_or_the_least_that_would(
    args: list[str], code: int, says: list[str]
) -> None:
    shown = lockstep("plan", "--device", "cpu", *args, code=code)
    assert [each for each in says if each not in shown] == []


@pytest.mark.parametrize(
    ("args", "named"),
    [
        pytest.param(
            ["--device", "cuda"],
            "torch sees no GPU; --memory plans for one that is not here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (["--device", "cuda:1", "--tensor-parallel", "2"], "device cuda:1 is a single device"),
        (["--context-len", "4096"], "context_len: 4096 is over"),
        (["--target", "/nowhere"], "/nowhere"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--plan-rows", "5000"], "--plan-rows"),
        (["--tensor-parallel", "5"], "tensor_parallel: num_attention_heads is"),
    ],
)
def test_a_wrong_option_is_named(args: list[str], named: str) -> None:
    assert named in lockstep("plan", "--device", "cpu", *args, code=2)
