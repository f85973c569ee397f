"""Proves: `lockstep simulate` says what came of it as a table, JSON and a picture, the same for the
same seed, and refuses what it cannot simulate by the option's name."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from cluster.cli import main

RUN = CliRunner()
SMALL = ["simulate", "--requests", "30", "--new-tokens", "5..20", "--prompt-tokens", "30"]


def simulated(tmp_path: Path, *args: str) -> dict[str, object]:
    path = tmp_path / "out" / "figures.json"
    result = RUN.invoke(main, [*SMALL, "--json", str(path), *args])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_each_case_has_its_figures(tmp_path: Path) -> None:
    picture = tmp_path / "out" / "picture.svg"
    report = simulated(
        tmp_path,
        *("--replicas", "2,4", "--shards", "1,2", "--baseline", "eqspec", "--in-flight", "8"),
        *("--per-replica", "--svg", str(picture)),
    )
    assert report["simulated"]["arrivals"] == "closed loop, 8 in flight for each replica"  # type: ignore[index]
    cases = report["cases"]
    assert isinstance(cases, list)
    named = [(case["replicas"], case["shards"], case["rows"]) for case in cases]
    assert named == [
        (replicas, shards, rows)
        for replicas in (2, 4)
        for shards in (1, 2)
        for rows in ("grouped", "arrival")
    ]
    for case in cases:
        assert case["requests"] == case["finished"] == 30 * case["replicas"]
        assert case["in_flight"] == 8 * case["replicas"]
        assert case["tokens_per_s"] > 0
        assert 0 < case["utilisation"] <= 1.01
        assert 0 < case["pool_utilisation"] <= 1.01
        assert 0 < case["ttft_s"]["p50"] <= case["latency_s"]["p50"] <= case["latency_s"]["p99"]
        assert 0 <= case["padding"] < 1
        assert case["over_time"][-1]["committed_tokens"] == case["new_tokens"]
    plots = ElementTree.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}svg")
    # Four for each case, and throughput over replicas for each way.
    assert len(plots) == 4 * len(cases) + 4


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    args = ("--rate", "50", "--bursts", "0.2,0.3", "--acceptance", "0.9:1,0.2:1")
    first, again = simulated(tmp_path, *args), simulated(tmp_path, *args)
    assert first == again
    assert simulated(tmp_path, *args, "--seed", "1") != first


def test_a_trace_and_fitted_times_are_taken_as_they_are(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"at_s": 0.0, "prompt_tokens": 10, "new_tokens": 20, "acceptance": 1.0}
    trace.write_text(json.dumps(line) + "\n")
    times = tmp_path / "times.json"
    fitted = dict.fromkeys(
        ("draft_fixed_s", "verify_token_s", "prefill_token_s", "prefill_fixed_s"), 0.0
    )
    times.write_text(json.dumps({**fitted, "verify_fixed_s": 0.5}))
    report = simulated(tmp_path, "--trace", str(trace), "--times", str(times), "--draft-len", "4")
    (case,) = report["cases"]  # type: ignore[misc]
    # Four steps of five tokens each.
    assert case["latency_s"]["p50"] == pytest.approx(2.0, abs=0.02)  # type: ignore[index]


def test_lengths_come_from_prompts_by_their_characters(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x" * 400}) + "\n")
    report = simulated(tmp_path, "--prompts", str(prompts), "--rate", "20")
    assert report["simulated"]["prompt_tokens"] == "prompts.jsonl"  # type: ignore[index]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "--rate"),
        (["--rate", "1", "--in-flight", "1"], "--rate"),
        (["--in-flight", "1", "--bursts", "1,1"], "--bursts"),
        (["--rate", "1", "--bursts", "0,1"], "--bursts"),
        (["--rate", "1", "--device", "abacus"], "--device"),
        (["--rate", "1", "--pair", "odd"], "--pair"),
        (["--rate", "1", "--replicas", "0"], "--replicas"),
        (["--rate", "1", "--shards", "9", "--replicas", "8"], "shard"),
        (["--rate", "1", "--new-tokens", "no"], "--new-tokens"),
        (["--rate", "1", "--acceptance", "2"], "--acceptance"),
        (["--rate", "1", "--pool-cost", "dear"], "--pool-cost"),
        (["--rate", "1", "--baseline", "vllm"], "--baseline"),
        (["--trace", __file__], "--trace"),
        (["--rate", "1", "--times", __file__], "--times"),
        (["--rate", "1", "--prompts", __file__], "--prompts"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(args: list[str], says: str) -> None:
    result = RUN.invoke(main, [*SMALL, *args])
    assert result.exit_code == 2
    assert says in result.output
