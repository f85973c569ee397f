"""Proves: `lockstep simulate` says what came of it as a table and JSON, and refuses what it
cannot simulate by the option's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.cli.command import lockstep

SMALL = ["--requests", "30", "--new-tokens", "5..20", "--prompt-tokens", "30"]


def test_each_case_has_its_figures(tmp_path: Path) -> None:
    path = tmp_path / "out" / "figures.json"
    lockstep(
        *("simulate", *SMALL, "--replicas", "2", "--replicas", "4", "--shards", "1"),
        *("--shards", "2", "--in-flight", "8", "--per-replica", "--draft-len", "4"),
        *("--json", str(path)),
    )
    report = json.loads(path.read_text())
    assert report["simulated"]["scheduler"]["draft_len"] == 4
    asked = report["simulated"]["options"]
    assert (asked["in_flight"], asked["per_replica"], asked["replicas"]) == (8, True, [2, 4])
    cases = report["cases"]
    named = [(case["replicas"], case["shards"]) for case in cases]
    assert named == [(2, 1), (2, 2), (4, 1), (4, 2)]
    for case in cases:
        assert case["requests"] == case["finished"] == 30 * case["replicas"]
        assert (case["refused"], case["refusal"]) == (0, None)
        assert case["in_flight"] == 8 * case["replicas"]
        assert case["tokens_per_s"] > 0
        assert 0 < case["utilisation"] <= 1.01
        assert 0 < case["pool_utilisation"] <= 1.01
        assert 0 < case["ttft_s"]["p50"] <= case["latency_s"]["p50"] <= case["latency_s"]["p99"]
        assert case["over_time"][-1]["committed_tokens"] == case["new_tokens"]


@pytest.mark.parametrize(("lengths", "code"), [("20..65535", 0), ("65535", 1)])
def test_who_is_refused_is_shown_and_that_nothing_finished_is_an_error(
    lengths: str, code: int, tmp_path: Path
) -> None:
    path = tmp_path / "figures.json"
    args = ["simulate", "--in-flight", "4", "--requests", "10", "--new-tokens", lengths]
    said = lockstep(*args, "--pool-cost", "none", "--json", str(path), code=code)
    (case,) = json.loads(path.read_text())["cases"]
    assert 0 < case["refused"] <= case["requests"] == case["refused"] + case["finished"]
    assert (case["finished"] == 0) == ("no request finished" in said) == (code == 1)
    assert f"10, {case['refused']}" in said
    assert f"refused, the first: {case['refusal']}" in said
    assert case["refusal"].startswith("max_new_tokens")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "--rate"),
        (["--rate", "1", "--in-flight", "1"], "--rate"),
        (["--rate", "1", "--device", "abacus"], "--device"),
        (["--rate", "1", "--pair", "odd"], "--pair"),
        (["--rate", "1", "--replicas", "0"], "--replicas"),
        (["--rate", "1", "--shards", "9", "--replicas", "8"], "shard"),
        (["--rate", "1", "--new-tokens", "no"], "--new-tokens"),
        (["--rate", "1", "--acceptance", "2"], "--acceptance"),
        (["--rate", "1", "--pool-cost", "dear"], "--pool-cost"),
        (["--rate", "1", "--json", "/dev"], "--json"),
        (["--rate", "1", "--rows-max", "100000"], "--rows-max"),
        (["--rate", "1", "--draft-len", "100"], "--draft-len"),
        (["--rate", "1", "--wait-rounds", "5000"], "--wait-rounds"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(args: list[str], says: str) -> None:
    assert says in lockstep("simulate", *SMALL, *args, code=2)
