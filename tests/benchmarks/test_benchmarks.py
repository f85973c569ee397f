"""Proves: the device's benchmark and the engine's run without the packages that they say they do
without; with a draft that is never right the whole scheduler costs less than 3 % of the speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.adaptive import measure

ROOT = Path(__file__).parents[2]
OURS = ("plain", "head", "deterministic", "deterministic head")
# As on a machine with torch and transformers alone.
WITHOUT_CLUSTER = """
import runpy, sys

ABSENT = {"ray", "grpc", "fastapi", "starlette", "uvicorn", "typer", "protos"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import benchmarks.engine, cluster.bench.engine
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


def test_the_tiny_shape_runs_from_a_plain_checkout_and_says_what_it_should(tmp_path: Path) -> None:
    figures_file = tmp_path / "new" / "figures.json"
    options = ["--shape", "tiny", "--device", "cpu", "--dtype", "bfloat16"]
    options += ["--batches", "1", "3", "--alone", "3", "--json", str(figures_file)]
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
        assert run["compared"] == (3 if mode == "transformers" else max(batch, 2))
        if mode.startswith("deterministic"):
            assert run["identical"] == run["compared"]
        if mode != "transformers":
            assert run["committed"] >= 1 + (k > 0) * 0.3
            assert (run["ceiling"] > ran[mode, 1, k]["ceiling"]) == (batch > 1)
            assert (run["over_plain"] == 1.0) == (k == 0)
            assert run["over_usual"] > 0
            assert (run["over_usual"] == 1.0) == (mode == "plain")
            assert run["prefill_tokens_per_s"] > 0


@pytest.mark.parametrize("rows", [1, 16])
def test_a_draft_that_is_never_right_costs_less_than_three_percent(rows: int) -> None:
    """Of the speed; drafting in vain would show."""
    measured = measure("never right", (0.0,), rows, fixed=(0, 2))
    assert measured.chosen / measured.fixed[0] > 0.97 > measured.fixed[2] / measured.fixed[0]
