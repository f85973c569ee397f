"""Proves that the device benchmark runs without the cluster's packages and counts work rightly."""

from __future__ import annotations

import gc
import inspect
import json
import math
import os
import subprocess
import sys
import warnings
import weakref
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu import __main__ as gpu, runs
from benchmarks.gpu.ceilings import ModelWork, Rates
from benchmarks.gpu.runs import UNRECORDED, Mode
from replicas.config import ReplicaConfig
from replicas.cuda import graphs
from replicas.models.pair import Pair
from replicas.models.planted import planted_config
from replicas.models.shapes import parse_planted
from replicas.replica import Replica

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
    figures_file = tmp_path / "new" / "figures.json"
    options = ["--shape", "tiny", "--device", "cpu", "--dtype", "bfloat16"]
    options += ["--batches", "1", "3", "--json", str(figures_file)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CLUSTER, *options],
        cwd=ROOT,
        # Two threads that wait for one another nearly stand still beside a busy process.
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    written = json.loads(figures_file.read_text())
    states = {mode: said["state"] for mode, said in written["modes"].items()}
    assert list(states) == ["plain", "transformers", *OURS[1:]]
    assert set(states.values()) == {"measured"}
    assert written["follows"] == pytest.approx(0.7, abs=0.05)
    assert written["copy_gb_per_s"] > 0
    ran = {(run["mode"], run["batch"], run["draft_len"]): run for run in written["runs"]}
    assert set(ran) == {
        *((mode, batch, k) for mode in OURS for batch in (1, 3) for k in (0, 3)),
        ("transformers", 8, 0),
    }
    for (mode, batch, k), run in ran.items():
        # Not that the speed is below the ceiling: its rates were measured at another time.
        assert min(run["tokens_per_s"], run["ceiling"]) > 0
        assert run["compared"] == (8 if mode == "transformers" else max(batch, 2))
        if mode.startswith("deterministic"):
            assert run["identical"] == run["compared"]
        if mode != "transformers":
            assert run["committed"] >= 1 + (k > 0) * 0.3
            assert (run["ceiling"] > ran[mode, 1, k]["ceiling"]) == (batch > 1)
            assert (run["over_plain"] == 1.0) == (k == 0)
            assert run["over_usual"] > 0
            assert (run["over_usual"] == 1.0) == (mode == "plain")
            assert run["prefill_tokens_per_s"] > 0


OURS = ("plain", "head", "deterministic", "deterministic head")
SMALL = ["--shape", "tiny", "--device", "cpu", "--batches", "1", "--new-tokens", "4"]
SMALL += ["--alone", "2"]


def test_a_mode_that_fails_is_told_keeps_what_it_had_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And of no mode anything is alive when the next one begins."""
    figures_file = tmp_path / "figures.json"
    alive: list[weakref.ref[Any]] = []
    lockstep, load = runs.lockstep, runs.load_pair

    def loaded(config: ReplicaConfig) -> Pair:
        assert not any(one() for one in alive)
        pair = load(config)
        alive.append(weakref.ref(pair.target))
        return pair

    def run(replica: Replica, *args: Any) -> Any:
        if args[-1] and len(alive) == 4:
            raise torch.OutOfMemoryError("out of memory:\n  a | b")
        return lockstep(replica, *args)

    monkeypatch.setattr(runs, "load_pair", loaded)
    monkeypatch.setattr(runs, "lockstep", run)
    assert gpu.main([*SMALL, "--json", str(figures_file)]) == 1
    written = json.loads(figures_file.read_text())
    states = {mode: said["state"] for mode, said in written["modes"].items()}
    assert [mode for mode, state in states.items() if state != "measured"] == ["deterministic"]
    assert written["modes"]["deterministic"]["message"] == "OutOfMemoryError: out of memory: a | b"
    assert "OutOfMemoryError: out of memory: a \\| b" in capsys.readouterr().out
    done = {(run["mode"], run["draft_len"]) for run in written["runs"]}
    assert {(mode, k) for mode in ("plain", "head", "deterministic head") for k in (0, 3)} <= done
    assert ("deterministic", 3) not in done
    gc.collect()
    assert not any(one() for one in alive)


def test_a_run_that_is_cut_off_leaves_the_modes_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: Any) -> None:
        raise KeyboardInterrupt

    figures_file = tmp_path / "figures.json"
    monkeypatch.setattr(runs, "generate", cut_off)
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*SMALL, "--json", str(figures_file)])
    written = json.loads(figures_file.read_text())
    states = {mode: said["state"] for mode, said in written["modes"].items()}
    assert states.pop("plain") == "measured"
    assert set(states.values()) == {"waiting"}
    assert {run["mode"] for run in written["runs"]} == {"plain"}


def test_steps_that_run_unrecorded_are_told_by_the_warning_that_replicas_give(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f'"{UNRECORDED}: ' in inspect.getsource(graphs)

    def warned(*_: Any) -> dict[str, float]:
        for kind in (1, 2, 2):
            warnings.warn(f"{UNRECORDED}: {kind}:\n no memory", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return {}

    monkeypatch.setattr(runs, "measure", warned)
    mode = Mode(ReplicaConfig(device="cpu"))
    runs.attempt("plain", mode, Namespace(), Rates(1.0, 1.0))
    assert mode.unrecorded == [f"{UNRECORDED}: 1: no memory", f"{UNRECORDED}: 2: no memory"]
    assert "something else" in capsys.readouterr().err
    assert len(runs.one_line("x" * 5000)) == 300


def test_the_work_of_qwen3_8b_is_what_its_sizes_say_and_a_batch_shares_the_weights() -> None:
    with torch.device("meta"):
        config = planted_config(parse_planted("planted:qwen3-8b"))
        work = ModelWork.of(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    layer = 4096 * 128 * (32 + 8 + 8) + 32 * 128 * 4096 + 3 * 4096 * 12_288
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    weights, kv_bytes = 36 * layer + norms + 4096 * 151_936, 36 * 2 * 8 * 128 * 2
    assert (work.weights, work.kv_bytes) == (weights, kv_bytes)
    moving, multiplying = Rates(1e12, math.inf), Rates(math.inf, 1e14)
    moved, operations = 2 * weights + 100 * kv_bytes, 2 * weights + 100 * 36 * 4 * 32 * 128
    assert work.least_s(moving, 1, 1, 100) == pytest.approx(moved / 1e12)
    assert work.least_s(multiplying, 1, 1, 100) == pytest.approx(operations / 1e14)
    for rates, more in ((moving, 1), (multiplying, 8)):
        assert work.least_s(rates, 10, 80, 0) == more * work.least_s(rates, 10, 10, 0)
    both = Rates(1e12, 1e14)
    assert work.least_s(both, 1, 1, 100) == pytest.approx(moved / 1e12), "the longer of the two"
