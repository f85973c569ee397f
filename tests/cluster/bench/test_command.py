"""Proves: the command refuses what contradicts itself, shows and writes what a load has found
whatever comes after it, and with --engine and --compare measures the demo pair from prompts to
pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.bench import session
from cluster.bench.compare import Comparison, Contender
from cluster.bench.report import Report
from cluster.bench.workload import synthetic_prompts
from scheduler.simulation import parse_lengths
from tests.cluster.bench.test_report import report
from tests.cluster.cli.command import lockstep


@pytest.mark.parametrize(
    "arguments",
    [
        ["--in-flight", "4", "--rate", "2"],
        ["--rate", "2", "--burst", "3"],
        ["--prompts", __file__, "--prompt-tokens", "5"],
        ["--prompt-tokens", "9..3"],
        ["--prompt-tokens", "few"],
        ["--compare", "--temperature", "1"],
        ["--top-p", "1.5"],
        ["--min-p", "nan"],
        ["--requests", "0"],
        ["--max-new-tokens", "10000000000"],
        ["--top-k", "10000000000"],
        ["--seed", str(2**63 - 1)],
        ["--dtype", "float12"],
    ],
)
def test_what_contradicts_itself_is_refused(arguments: list[str]) -> None:
    lockstep("bench", "--engine", *arguments, code=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine", "--every", "3"], "--every: only with --burst"),
        (["--engine", "--rounds", "2"], "--rounds: only with --compare"),
        (["--engine", "--compare-prompts", "2"], "--compare-prompts: only with --compare"),
        (["--batch-size", "4"], "scheduler.rows_max: only with --engine or --compare"),
        (["--dtype", "float32"], "replica.dtype: only with --engine or --compare"),
        (["--engine", "--top-p", "1.5"], "--top-p: must be in [0, 1], is 1.5"),
    ],
)
def test_an_option_that_would_do_nothing_or_is_wrong_is_named(
    arguments: list[str], said: str
) -> None:
    assert said in lockstep("bench", "--address", "localhost:1", *arguments, code=2)


WRONG = "RuntimeError: [enforce fail at alloc_cpu.cpp:117] [/models/x] :cat: no memory"
"""Brackets, a slash in them and colons mean something to rich."""


def found() -> Report:
    """Of a load in which nothing failed."""
    made = report(None)
    return replace(made, summary=replace(made.summary, failed=0))


def measuring(monkeypatch: pytest.MonkeyPatch, reports: Callable[[], Iterator[Report]]) -> None:
    """The command gets these reports instead of a run."""
    monkeypatch.setattr(session, "run_on_engine", lambda *_given: reports())


def test_a_comparison_that_fails_leaves_figures_and_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reports() -> Iterator[Report]:
        yield replace(found(), not_compared="not yet", notes=("no [spread]",))
        assert json.loads(path.read_text())["not_compared"] == "not yet"
        yield replace(found(), not_compared=WRONG, notes=("no [spread]",))

    path = tmp_path / "a.json"
    measuring(monkeypatch, reports)
    said = lockstep("bench", "--engine", "--json", str(path), code=1)
    assert f"Not compared: {WRONG}" in said
    assert said.count("committed per row and step") == 1
    assert "no [spread]" in said
    data = json.loads(path.read_text())
    assert (data["not_compared"], data["figures"]["new_tokens"]) == (WRONG, 12)


def test_a_request_that_fails_on_any_server_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for last, status in ((found(), 0), (report(None), 1)):
        servers = {"http://a": found().summary, "http://b": last.summary}
        both = replace(found(), servers=servers)
        monkeypatch.setattr(session, "run_on_openai", lambda *_given, both=both: iter([both]))
        arguments = [part for url in servers for part in ("--openai", url)]
        lockstep("bench", *arguments, code=status)


def test_an_interrupted_comparison_leaves_them_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reports() -> Iterator[Report]:
        yield replace(found(), not_compared="not yet")
        raise KeyboardInterrupt

    measuring(monkeypatch, reports)
    said = lockstep("bench", "--engine", "--html", str(tmp_path / "a.html"), code=130)
    assert "committed per row and step" in said
    assert "There is none: not yet" in (tmp_path / "a.html").read_text()


def test_why_a_way_does_not_run_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "no [/models/x] [bold]"
    comparison = Comparison(2, 4, 1, "", (Contender("a way", 2, (), 0, why),), (), "1 [left] out")
    measuring(
        monkeypatch,
        lambda: iter([replace(found(), not_compared="x"), replace(found(), comparison=comparison)]),
    )
    said = lockstep("bench", "--engine")
    assert why in said
    assert "1 [left] out" in said


def test_an_error_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def reports() -> Iterator[Report]:
        raise OSError(WRONG)
        yield

    measuring(monkeypatch, reports)
    assert WRONG in lockstep("bench", "--engine", code=2)


def test_an_output_that_cannot_be_written_is_refused_before_the_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measuring(monkeypatch, lambda: pytest.fail("the load has begun"))
    arguments = ["bench", "--engine", "--json", str(tmp_path), "--html", str(tmp_path / "a.html")]
    assert str(tmp_path) in lockstep(*arguments, code=2)


def test_an_output_that_is_lost_meanwhile_costs_neither_figures_nor_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reports() -> Iterator[Report]:
        (tmp_path / "a.html").mkdir()
        yield found()

    measuring(monkeypatch, reports)
    arguments = ["--html", str(tmp_path / "a.html"), "--json", str(tmp_path / "a.json")]
    said = lockstep("bench", "--engine", *arguments, code=1)
    assert "a.html was not written" in said
    assert "committed per row and step" in said
    assert json.loads((tmp_path / "a.json").read_text())["figures"]["new_tokens"] == 12


@pytest.mark.parametrize(
    ("text", "least", "most"), [("64", 64, 64), ("64..512", 64, 512), ("1..1", 1, 1)]
)
def test_lengths_are_read_and_prompts_keep_to_them(text: str, least: int, most: int) -> None:
    lengths = parse_lengths(text)
    prompts = synthetic_prompts(40, lengths, 50, seed=2)
    assert all(least <= len(prompt) <= most for prompt in prompts)
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    assert prompts == synthetic_prompts(40, lengths, 50, seed=2)
    assert prompts != synthetic_prompts(40, lengths, 50, seed=3)


def test_the_demo_pair_from_prompts_to_pages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = ["The for statement is", "A module is", "import os\n", "The del statement removes"]
    path.write_text("\n".join(json.dumps({"turns": [text]}) for text in texts))
    arguments = [
        *("bench", "--engine", "--prompts", str(path), "--requests", "6", "--warm-up", "1"),
        *("--max-new-tokens", "6", "--batch-size", "2", "--in-flight", "4", "--device", "cpu"),
        *("--compare", "--rounds", "1", "--compare-prompts", "2"),
        *("--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")),
    ]
    lockstep(*arguments)
    data = json.loads((tmp_path / "a.json").read_text())
    figures, comparison = data["figures"], data["comparison"]
    assert (figures["requests"], figures["failed"], figures["new_tokens"]) == (6, 0, 36)
    assert 0 <= figures["padding"] < 1
    assert figures["latency_s"]["count"] == 6
    ways = {each["name"]: each for each in comparison["contenders"]}
    for name in (
        *("Lockstep, batch 2", "Lockstep, k = 0, batch 2", "Lockstep, batch 1"),
        *("Lockstep, k = 0, batch 1", "transformers continuous batching, batch 2"),
        *("transformers generate, batch 2", "transformers assisted, batch 1"),
    ):
        assert ways[name]["identical"] == 2, name
    assert "Lockstep, batch 1 over transformers assisted, batch 1" in {
        each["name"] for each in comparison["ratios"]
    }
    assert "transformers generate, batch 1" in (tmp_path / "a.html").read_text()
