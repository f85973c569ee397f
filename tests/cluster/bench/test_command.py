"""Proves: the command refuses what contradicts itself, and with --engine and --compare measures
the demo pair from prompts to pages.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.bench.workload import Lengths, synthetic_prompts
from cluster.cli import main

RUN = CliRunner()


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
        ["--dtype", "float12"],
    ],
)
def test_what_contradicts_itself_is_refused(arguments: list[str]) -> None:
    assert RUN.invoke(main, ["bench", "--engine", *arguments]).exit_code == 2


def test_no_server_is_an_error_with_a_sentence() -> None:
    result = RUN.invoke(main, ["bench", "--address", "localhost:1"])
    assert result.exit_code == 1
    assert "localhost:1" in result.output


@pytest.mark.parametrize(
    ("text", "least", "most"), [("64", 64, 64), ("64..512", 64, 512), ("1..1", 1, 1)]
)
def test_lengths_are_read_and_prompts_keep_to_them(text: str, least: int, most: int) -> None:
    lengths = Lengths.parse(text)
    assert (lengths.least, lengths.most) == (least, most)
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
    result = RUN.invoke(main, arguments)
    assert result.exit_code == 0, result.output
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
