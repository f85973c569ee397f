"""Proves: a replica under load stays within the budget that `lockstep plan` divided for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MEMORY = "100MiB"


def run(*args: str) -> dict[str, object]:
    out = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(out.stdout)
    return found


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory from /proc")
def test_what_a_load_and_long_prompts_take_stays_within_the_plan() -> None:
    args = ("plan", "tiny", "--device", "cpu", "--memory", MEMORY, "--json")
    planned = run("-m", "cluster.cli.main", *args)
    measured = run("-m", "tests.measured_load", MEMORY)
    assert measured["kv_blocks"] == planned["kv"]["blocks"]
    # More than the weights, or nothing was measured.
    weights = sum(planned["weights_bytes"].values())
    assert weights < measured["growth_bytes"] <= planned["total_bytes"]
