"""Proves: `lockstep simulate` says what came of it as a table, JSON and a picture, the same for the
same seed, and refuses what it cannot simulate by the option's name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cluster.cli.command import lockstep

SMALL = ["--requests", "30", "--new-tokens", "5..20", "--prompt-tokens", "30"]


def simulated(tmp_path: Path, *args: str) -> Any:
    path = tmp_path / "out" / "figures.json"
    load = [] if "--trace" in args else SMALL
    lockstep("simulate", *load, "--json", str(path), *args)
    return json.loads(path.read_text())


def trace_of(tmp_path: Path, *lines: dict[str, object]) -> Path:
    path = tmp_path / "trace.jsonl"
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def test_each_case_has_its_figures(tmp_path: Path) -> None:
    picture = tmp_path / "out" / "picture.svg"
    report = simulated(
        tmp_path,
        *("--replicas", "2,4", "--shards", "1,2", "--baseline", "eqspec", "--in-flight", "8"),
        *("--per-replica", "--svg", str(picture)),
    )
    asked = report["simulated"]["options"]
    assert (asked["in_flight"], asked["per_replica"], asked["replicas"]) == (8, True, "2,4")
    cases = report["cases"]
    named = [(case["replicas"], case["shards"], case["rows"]) for case in cases]
    assert named == [
        (replicas, shards, rows)
        for replicas in (2, 4)
        for shards in (1, 2)
        for rows in ("grouped", "arrival")
    ]
    for case in cases:
        assert case["requests"] == case["finished"] == 30 * case["replicas"]
        assert (case["refused"], case["refusal"]) == (0, None)
        assert case["in_flight"] == 8 * case["replicas"]
        assert case["tokens_per_s"] > 0
        assert 0 < case["utilisation"] <= 1.01
        assert 0 < case["pool_utilisation"] <= 1.01
        assert 0 < case["ttft_s"]["p50"] <= case["latency_s"]["p50"] <= case["latency_s"]["p99"]
        assert 0 <= case["padding"] < 1
        assert case["over_time"][-1]["committed_tokens"] == case["new_tokens"]
    words = list(ElementTree.parse(picture).getroot().itertext())
    assert [words.count(title) for title in ("Replicas' time at work", "tokens/s")] == [8, 4]


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    args = ("--rate", "50", "--bursts", "0.2,0.3", "--acceptance", "0.9:1,0.2:1")
    first, again = simulated(tmp_path, *args), simulated(tmp_path, *args)
    assert first == again
    assert simulated(tmp_path, *args, "--seed", "1") != first


def test_a_trace_and_fitted_times_are_taken_as_they_are(tmp_path: Path) -> None:
    line: dict[str, object] = {"prompt_tokens": 10, "new_tokens": 20, "acceptance": 1.0}
    # Such a line break may stand in a JSON string as it is.
    trace = trace_of(tmp_path, {"at_s": 0.0, **line, "note": "a\u2028b\u2029c\x85d"})
    times = tmp_path / "times.json"
    fitted = dict.fromkeys(
        ("draft_fixed_s", "verify_token_s", "prefill_token_s", "prefill_fixed_s"), 0.0
    )
    times.write_text(json.dumps({**fitted, "verify_fixed_s": 0.5}))
    report = simulated(tmp_path, "--trace", str(trace), "--times", str(times), "--draft-len", "4")
    [case] = report["cases"]
    # Four steps of five tokens each.
    assert case["latency_s"]["p50"] == pytest.approx(2.0, abs=0.02)
    assert report["simulated"]["options"]["times"] == str(times)
    assert report["simulated"]["scheduler"]["draft_len"] == 4


def test_a_trace_may_begin_at_any_time(tmp_path: Path) -> None:
    lines = [{"at_s": 1.7e9 + at_s, "prompt_tokens": 10, "new_tokens": 20} for at_s in (0, 1)]
    [case] = simulated(tmp_path, "--trace", str(trace_of(tmp_path, *lines)))["cases"]
    assert case["elapsed_s"] == pytest.approx(1.0, abs=0.2)
    assert case["tokens_per_s"] == pytest.approx(40 / case["elapsed_s"], rel=1e-3)
    over_time = case["over_time"]
    assert (over_time[0]["at_s"], over_time[-1]["at_s"]) == (0.0, case["elapsed_s"])


def test_who_is_refused_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    args = ["simulate", "--in-flight", "4", "--requests", "10", "--new-tokens", "20..65535"]
    said = lockstep(*args, "--pool-cost", "none", "--json", str(path))
    (case,) = json.loads(path.read_text())["cases"]
    assert 0 < case["refused"] < case["requests"] == case["refused"] + case["finished"]
    assert re.search(rf"of them refused\W+{case['refused']}\b", said)
    assert "max_new_tokens" in said
    assert case["refusal"].startswith("max_new_tokens")
    assert "refused" not in lockstep("simulate", *SMALL, "--rate", "20")


def test_where_nothing_finished_there_is_a_report_and_an_error(tmp_path: Path) -> None:
    path, picture = tmp_path / "figures.json", tmp_path / "picture.svg"
    args = ["--rate", "10", "--requests", "5", "--prompt-tokens", "40000", "--replicas", "1,2,4"]
    outputs = ["--json", str(path), "--svg", str(picture)]
    assert "no request finished" in lockstep("simulate", *args, *outputs, code=1)
    assert [case["refused"] for case in json.loads(path.read_text())["cases"]] == [5, 5, 5]
    ElementTree.parse(picture)


@pytest.mark.parametrize("option", ["--json", "--svg"])
@pytest.mark.parametrize("path", ["a folder", "a file/figures"])
def test_where_nothing_can_be_written_nothing_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, path: str
) -> None:
    monkeypatch.setattr("cluster.simulate.run", None)
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a file").write_text("as it was")
    args = ["simulate", *SMALL, "--rate", "1", option, str(tmp_path / path)]
    assert option in lockstep(*args, code=2)


def test_files_are_written_after_the_table_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there stays while cases run, and whatever fails then the table is there."""
    old, new, full = tmp_path / "old.json", tmp_path / "new.svg", Path("/dev/full")
    old.write_text("as it was")

    def fail(*_: object) -> None:
        raise RuntimeError

    args = ["simulate", *SMALL, "--rate", "20"]
    with monkeypatch.context() as patch:
        patch.setattr("cluster.simulate.run", fail)
        lockstep(*args, "--json", str(old), "--svg", str(new), code=1)
    assert old.read_text() == "as it was"
    assert not new.exists()
    if full.exists():
        said = lockstep(*args, "--json", str(full), code=1)
        assert "tokens/s" in said
        assert "--json" in said


def test_lengths_come_from_prompts_by_their_characters(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x" * 400}) + "\n")
    report = simulated(tmp_path, "--prompts", str(prompts), "--rate", "20")
    assert report["simulated"]["options"]["prompts"] == str(prompts)


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
        (["--rate", "1", "--bursts", "nan,1"], "--bursts"),
        (["--rate", "1", "--batch-size", "100000"], "--batch-size"),
        (["--rate", "1", "--draft-len", "100"], "--draft-len"),
        (["--rate", "1", "--wait-rounds", "5000"], "--wait-rounds"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(args: list[str], says: str) -> None:
    assert says in lockstep("simulate", *SMALL, *args, code=2)


@pytest.mark.parametrize(
    "beside",
    [
        ["--requests", "2000"],
        ["--per-replica"],
        ["--prompt-tokens", "30"],
        ["--prompts", __file__],
        ["--new-tokens", "30"],
    ],
)
def test_what_a_trace_says_is_not_said_again(tmp_path: Path, beside: list[str]) -> None:
    trace = trace_of(tmp_path, {"at_s": 0.0, "prompt_tokens": 10, "new_tokens": 20})
    assert beside[0] in lockstep("simulate", "--trace", str(trace), *beside, code=2)


@pytest.mark.parametrize("option", ["--trace", "--prompts", "--times"])
@pytest.mark.parametrize("content", [b"# no JSON\n", b"\xff\xfe{}\n"])
def test_a_file_that_cannot_be_read_is_refused_by_its_option(
    tmp_path: Path, option: str, content: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    load = [] if option == "--trace" else ["--rate", "1"]
    assert option in lockstep("simulate", *load, option, str(path), code=2)
