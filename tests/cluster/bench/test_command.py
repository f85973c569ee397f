"""Proves: the command refuses what contradicts itself, shows what a load has found whether or not
it can be written, says of what fails why, and with --engine measures the demo pair.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.bench import session
from cluster.bench.report import Report
from replicas.replica import Replica
from tests.cluster.bench.test_report import report
from tests.cluster.cli.command import lockstep

DEMO = (
    *("bench", "--engine", "--target", "tiny", "--requests", "6", "--warm-up", "1"),
    *("--max-new-tokens", "6", "--rows-max", "2", "--in-flight", "4", "--device", "cpu"),
    "--no-calibrate",
)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine", "--in-flight", "4", "--rate", "2"], "give either --in-flight or --rate"),
        (["--prompts", __file__, "--prompt-tokens", "5"], "give either --prompts or"),
        (["--prompt-tokens", "9..3"], "'--prompt-tokens': expected N"),
        (["--requests", "0"], "--requests"),
        (["--max-new-tokens", "10000000000"], "max_new_tokens"),
        (["--seed", str(2**63 - 1)], "--seed"),
        (["--rows-max", "4"], "scheduler.rows_max: needs --engine"),
        (["--model", "x"], "--model and --endpoint need --openai"),
        (["--openai", "http://127.0.0.1:1"], "--openai needs --prompts"),
        (["--engine", "--address", "x"], "--address: cannot be combined with --engine or --openai"),
        (
            ["--openai", "x", "--draft-len", "2"],
            "--openai cannot be combined with --engine or --draft-len",
        ),
    ],
)
def test_what_contradicts_itself_or_is_wrong_is_named(arguments: list[str], said: str) -> None:
    shown = lockstep("bench", *arguments, code=2)
    assert said in " ".join(shown.replace("│", " ").split())


def found() -> Report:
    """Of a load in which nothing failed."""
    return replace(report(), summary=replace(report().summary, failed=0))


WRONG = "[enforce fail at alloc_cpu.cpp:117] [/models/x] :cat: no memory"
"""Brackets, a slash in them and colons mean something to rich."""


class Unanswered(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNKNOWN

    def details(self) -> str:
        return "unanswered"


@pytest.mark.parametrize(
    ("result", "code", "said"),
    [
        (found(), 0, "committed per row and step"),
        (report(), 1, "1 (UNAVAILABLE 1)"),
        (OSError(WRONG), 2, WRONG),
        (Unanswered(), 1, "localhost:1: UNKNOWN: unanswered"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["served", "a request failed", "an error", "no answer", "interrupted"],
)
def test_the_status_says_what_became_of_a_run(
    result: Any, code: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def send(*_given: object) -> None:
        if isinstance(result, BaseException):
            raise result

    service = session.Service(lambda _workload: send, vocab_size=9, said={})
    monkeypatch.setattr(session, "engine", lambda *_given: nullcontext(service))
    monkeypatch.setattr(session, "_report", lambda *_given: result)
    path = tmp_path / "new" / "a.json"
    monkeypatch.setenv("LOCKSTEP_ADDRESS", "localhost:1")
    assert said in lockstep("bench", "--engine", "--json", str(path), code=code)
    assert path.exists() == isinstance(result, Report)


def test_the_demo_pair_from_prompts_to_figures_though_a_page_cannot_be_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "a file").touch()
    written, lost = tmp_path / "a.json", tmp_path / "a file" / "a.html"
    outputs = ["--html", str(lost), "--json", str(written)]
    said = lockstep(*DEMO, "--temperature", "0.8", "--top-p", "0.9", *outputs, code=1)
    assert f"{lost} was not written: " in said
    assert "committed per row and step" in said
    data = json.loads(written.read_text())
    figures = data["figures"]
    assert (figures["requests"], figures["failed"], figures["new_tokens"]) == (6, 0, 36)
    assert figures["latency_s"]["count"] == 6
    assert data["settings"]["prompts"] == "random tokens, 64..256 per prompt"
    assert "is a directory" in lockstep("bench", "--json", str(tmp_path), code=2)


@pytest.mark.parametrize("command", ["bench", "verify"])
def test_an_engine_has_memory_for_what_is_asked_of_it(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[int] = []

    def load(config: Any, *_more: object) -> Any:
        told.append(config.plan_rows)
        raise ValueError("enough")

    monkeypatch.setattr(Replica, "load", load)
    monkeypatch.setattr("replicas.parallel.load_replica", load)
    (path := tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    arguments = [command, "--prompts", str(path), "--rows-max", "64"]
    lockstep(*arguments, *(["--engine"] if command == "bench" else []), code=2)
    assert told == [64]
