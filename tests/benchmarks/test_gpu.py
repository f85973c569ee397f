"""Proves that the device benchmark runs without the cluster's packages and counts work rightly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.ceilings import ModelWork, Rates, Work, measure_rates
from benchmarks.device_runs import Agreement, Made, agreement, generate_work, outputs_made
from cluster.local_engine import LocalEngine
from replicas.planted import planted_config
from replicas.shapes import parse_planted
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
from tests.tiny_pairs import tiny_replica

ROOT = Path(__file__).parents[2]

# As on a machine with torch and transformers alone.
WITHOUT_CLUSTER = """
import runpy, sys

ABSENT = {"ray", "grpc", "fastapi", "starlette", "uvicorn", "typer", "protos"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


def test_the_tiny_shape_runs_from_a_plain_checkout_and_says_what_it_should(tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    options = ["--shape", "tiny", "--device", "cpu", "--dtype", "bfloat16"]
    options += ["--batches", "1", "3", "--json", str(figures_file)]
    options += ["--attention", "gather", "varlen-256"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CLUSTER, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| deterministic | 3 | 3 |" in done.stdout
    assert "varlen-256: target: attention 'varlen' is not to be had" in done.stdout
    written = json.loads(figures_file.read_text())
    assert written["attention"]["gather"] == {"target": "gather", "draft": "gather"}
    assert written["figures"]["gather over plain, batch 3, k = 3"] > 0
    assert written["follows"] == pytest.approx(0.7, abs=0.05)
    assert written["device"]["copy_gb_per_s"] > 0
    runs = {(run["mode"], run["batch"], run["draft_len"]): run for run in written["runs"]}
    assert set(runs) == {
        *(
            (mode, batch, k)
            for mode in ("plain", "gather", "deterministic")
            for batch in (1, 3)
            for k in (0, 3)
        ),
        ("transformers", 8, 0),
    }
    for (mode, batch, k), run in runs.items():
        assert run["tokens_per_s"] > 0
        outputs = run["outputs"]
        compared, across = outputs["compared"], outputs["compared_across"]
        if mode == "deterministic":
            assert outputs["identical"] == compared == max(batch, 2)
            assert outputs["identical_across"] == across == (3 if batch == 3 else 0)
        elif mode == "plain" and batch == 1:
            assert across == 0, "a row by itself both times"
        elif mode == "transformers":
            assert (compared, across) == (8, 8)
            assert min(run["bandwidth_ceiling"], run["matrix_ceiling"]) > 0
        if mode != "transformers":
            assert run["committed"] >= 1 + (k > 0) * 0.3
            # Not that the speed is below them: they were measured at another time.
            assert min(run["bandwidth_ceiling"], run["matrix_ceiling"]) > 0
            alone, plain = runs[mode, 1, k], runs["plain", batch, k]
            assert (run["bandwidth_ceiling"] > alone["bandwidth_ceiling"]) == (batch > 1)
            if k == 0:
                assert run["matrix_ceiling"] == pytest.approx(plain["matrix_ceiling"], rel=0.02)
            assert (run["over_plain"] == 1.0) == (k == 0)
    assert written["figures"]["deterministic: outputs compared with another batch size"] == 6
    assert written["figures"]["deterministic: share of them identical"] == 1
    assert {prefill["mode"] for prefill in written["prefill"]} == {
        "plain",
        "gather",
        "deterministic",
    }


def made(rows: int, *outputs: int) -> list[Made]:
    return [Made([output], rows) for output in outputs]


def test_outputs_are_compared_with_those_alone_and_then_with_the_smallest_other_run() -> None:
    outputs = {
        ("a", 1, 0): made(1, 7, 8),
        ("a", 4, 0): made(4, 7, 8, 9, 5),
        ("a", 4, 3): made(4, 7, 1, 9, 6),
        ("b", 4, 0): made(4, 0, 0, 0, 0),
        ("transformers", 8, 0): made(8, 7, 2, 9, 5),
    }
    alone = {"a": made(1, 7, 8, 9)}
    # The fourth was not alone: it stands beside a run of the same batch size.
    assert agreement(("a", 4, 3), outputs, alone) == Agreement(2, 4, 2, 3)
    # Without drafting only the same run has the fourth.
    assert agreement(("a", 4, 0), outputs, alone) == Agreement(3, 3, 3, 3)
    assert agreement(("a", 1, 0), outputs, alone) == Agreement(2, 2, 0, 0)
    assert agreement(("a", 4, 3), outputs, {}) == Agreement(2, 4, 1, 2)
    assert agreement(("b", 4, 0), outputs, alone) == Agreement(0, 0, 0, 0)
    assert agreement(("transformers", 8, 0), outputs, alone) == Agreement(3, 4, 3, 4)


def test_an_output_is_of_the_largest_group_that_it_was_in() -> None:
    """Which may be smaller than the run's batch size: those count that were computed together."""
    engine = LocalEngine(tiny_replica("llama"), SchedulerConfig(rows_max=4, draft_len=0))
    requests = [Request(str(n), tuple(range(3, 9)), new) for n, new in enumerate((4, 9, 9))]
    engine.generate(requests)
    assert [each.rows for each in outputs_made(engine, requests)] == [3, 3, 3]
    assert [len(each.tokens) for each in outputs_made(engine, requests)] == [4, 9, 9]
    alone = LocalEngine(tiny_replica("llama"), SchedulerConfig(rows_max=4, draft_len=0))
    alone.generate(requests[:1])
    assert outputs_made(alone, requests[:1])[0].rows == 1


def test_generate_reads_its_weights_once_per_new_token() -> None:
    """The prompts' pass yields the first; no row reads further than its own content."""
    work = work_of("qwen3-0.6b")
    prompts, new = [10, 30], 4
    done = generate_work(work, prompts, new)
    fill, cached = work.prefill(prompts), (11 + 12 + 13) + (31 + 32 + 33)
    assert done.bytes == fill.bytes + 3 * work.weight_bytes + cached * work.kv_bytes
    assert done.operations == pytest.approx(
        fill.operations + 6 * 2 * work.weights + cached * work.attention_operations
    )
    assert generate_work(work, prompts, 1) == fill


def work_of(shape: str) -> ModelWork:
    with torch.device("meta"):
        config = planted_config(parse_planted(f"planted:{shape}"))
        return ModelWork.of(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def test_the_work_of_qwen3_8b_is_what_its_sizes_say() -> None:
    work = work_of("qwen3-8b")
    layer = 4096 * 128 * (32 + 8 + 8) + 32 * 128 * 4096 + 3 * 4096 * 12_288
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert work.weights == 36 * layer + norms + 4096 * 151_936
    assert work.weight_bytes == 2 * work.weights
    assert work.kv_bytes == 36 * 2 * 8 * 128 * 2
    one = work.decode(passes=1, tokens=1, positions=100)
    assert one.bytes == work.weight_bytes + 100 * work.kv_bytes
    assert one.operations == 2 * work.weights + 100 * 36 * 4 * 32 * 128


def test_a_batch_shares_the_weights_and_a_ceiling_is_work_over_rate() -> None:
    work = work_of("qwen3-0.6b")
    rates = Rates(bytes_per_s=1e12, operations_per_s=1e14)
    one, eight = work.decode(10, 10, 0), work.decode(10, 80, 0)
    assert eight.bandwidth_s(rates) == one.bandwidth_s(rates) == 10 * work.weight_bytes / 1e12
    assert eight.matrix_s(rates) == 8 * one.matrix_s(rates)
    assert one + eight == Work(one.bytes + eight.bytes, one.operations + eight.operations)
    # A prefill needs the output matrix for no more than one position.
    assert work.prefill([100]).operations < work.decode(1, 100, 5000).operations


def test_rates_are_measured_on_the_device() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32)
    assert 1e8 < rates.bytes_per_s < 1e13
    assert 1e8 < rates.operations_per_s < 1e15
