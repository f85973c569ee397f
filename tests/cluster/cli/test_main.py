"""Proves: the command starts fast, reads its inputs, key and certificates among them, strictly,
says what is wrong, and shows no key to anybody."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.cli import generate as cli_generate
from cluster.cli.generate import figures
from cluster.cli.status import shown, watch_status
from cluster.client.channel import Server
from cluster.config import ConfigError
from cluster.config_sources import api_key
from cluster.prompt_files import PromptsError, read_prompts
from protos import lockstep_pb2 as pb
from tests.cluster.cli.command import lockstep

NOWHERE = "localhost:1"
OPENAI = ["bench", "--prompts", __file__, "--openai", f"http://{NOWHERE}"]


def test_importing_the_command_imports_nothing_heavy() -> None:
    heavy = ("ray", "torch", "grpc", "transformers", "matplotlib")
    code = f"import sys, cluster.cli.main; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert out.stdout.strip() == "[]"


def test_the_version_is_that_of_the_package() -> None:
    assert lockstep("--version") == f"lockstep {version('lockstep')}\n"


def test_generate_sends_class_and_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[pb.GenerateRequest] = []

    def generate(server: object, prompt: str, options: dict[str, Any], as_json: bool) -> int:
        sent.append(pb.GenerateRequest(prompt=prompt, **options))
        return 0

    monkeypatch.setattr(cli_generate, "generate", generate)
    for priority in ("high", "normal", "low"):
        lockstep("generate", "x", "--priority", priority, "--cache-salt", "mine")
        of_class = pb.Priority.Value(f"PRIORITY_{priority.upper()}")
        expected = pb.GenerateRequest(prompt="x", priority=of_class, cache_salt="mine")
        assert sent.pop() == expected


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["generate", "\ud800"], "prompt: not UTF-8"),
        (["chat", "--system", "\ud800"], "--system: not UTF-8"),
        (["demo", "--max-new-tokens", "5000000000"], "--max-new-tokens"),
        (["generate", "x", "--top-k", str(2**31)], "top_k"),
        (["demo", "--grpc-port", "70000"], "server.grpc_port: must be at most 65535, is 70000"),
        (["status", "--watch", "--json", "--address", NOWHERE], "--watch: not with --json"),
    ],
)
def test_an_option_that_is_out_of_range_or_would_do_nothing_is_refused_by_name(
    args: list[str], said: str
) -> None:
    assert said in lockstep(*args, code=2)


@pytest.mark.parametrize("args", [["status"], ["bench"], ["generate", "x"], OPENAI])
def test_no_server_is_an_error_with_a_sentence(args: list[str]) -> None:
    assert NOWHERE in lockstep(*args, *([] if args is OPENAI else ["--address", NOWHERE]), code=1)


def test_a_key_is_in_no_log_and_one_of_a_file_goes_before_the_environment(tmp_path: Path) -> None:
    assert "secret" not in repr(Server("localhost:1", "secret"))
    (path := tmp_path / "key").write_text("from-file\n")
    environment = {"LOCKSTEP_API_KEY": " from-environment\n"}
    assert api_key(path, environment) == "from-file"
    assert api_key(None, environment) == "from-environment"
    assert api_key(None, {}) is None
    assert api_key(None, {"LOCKSTEP_API_KEY": " "}) is None


@pytest.mark.parametrize("content", ["", "\n", "two words", "a\nb", "schlüssel", "a\x00b"])
def test_what_is_no_key_is_refused_without_being_shown(tmp_path: Path, content: str) -> None:
    (path := tmp_path / "key").write_text(content)
    with pytest.raises(ConfigError) as caught:
        api_key(path, {})
    assert not content.strip() or content not in str(caught.value)
    lockstep("status", "--api-key-file", str(path), code=2)


def test_a_missing_file_or_half_a_certificate_is_a_wrong_option(tmp_path: Path) -> None:
    for option in ("--api-key-file", "--tls-ca", "--tls-cert", "--tls-key"):
        assert option in lockstep("status", option, str(tmp_path / "none"), code=2)
    (tmp_path / "half").touch()
    for option in ("--tls-cert", "--tls-key"):
        said = lockstep("generate", "x", option, str(tmp_path / "half"), code=2)
        assert "cert: a client certificate and its key belong together" in said


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    # Only the end of a line ends a prompt: others may stand in a JSON string as they are.
    texts = ["a\u2028b\u2029\x85", "c", "d", "e"]
    given: list[dict[str, Any]] = [
        {"prompt": texts[0], "turns": None},
        {"turns": ["c", "x"], "category": "y"},
        {"prompt": "d", "turns": [{"role": "user"}]},
        {"prompt": "e"},
    ]
    lines = [json.dumps(option, ensure_ascii=False) for option in given]
    path.write_text("\r\n\r\n".join(lines), encoding="utf-8", newline="")
    assert read_prompts(path) == texts
    assert read_prompts(path, 2) == texts[:2]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "no prompts"),
        (b'{"prompt": "a"}\n{', ":2: not a JSON object with a prompt"),
        (b"[1]", ":1: .*Expected `object`"),
        (b'{"prompt": ""}', ":1: .* must be a non-empty text"),
        # Half a character.
        (b'{"prompt": "a"}\n{"prompt": "b\\ud800"}', ":2: not a JSON object with a prompt"),
        (b'{"prompt": "a"}\n{"prompt": "\xe9"}\n', ":2: .*utf-8"),
    ],
)
def test_a_bad_prompt_file_names_the_line(tmp_path: Path, content: bytes, named: str) -> None:
    (path := tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(PromptsError, match=named):
        read_prompts(path)


def test_the_line_of_figures() -> None:
    end = pb.End(
        usage=pb.Usage(completion_tokens=60),
        speculation=pb.Speculation(steps=20, draft_tokens=80, accepted_tokens=40),
    )
    assert figures(end, total_s=2.0, first_s=0.05) == (
        "60 tokens in 2.00 s (30.0 tokens/s), first token after 50 ms, "
        "2.00 draft tokens accepted per step (50% of 80)"
    )


def test_watching_shows_every_answer_until_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), width=80, force_terminal=True)
    monkeypatch.setattr("cluster.cli.status.console", lambda: screen)
    monkeypatch.setattr("cluster.cli.status._WATCH_S", 0.0)
    answers = iter([pb.StatusResponse(waiting=waiting) for waiting in (7, 8)])

    def ask() -> pb.StatusResponse:
        try:
            return next(answers)
        except StopIteration:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        watch_status(ask)
    assert isinstance(screen.file, io.StringIO)
    shown_s = screen.file.getvalue()
    assert 0 < shown_s.index("7 waiting") < shown_s.index("8 waiting")


def test_status_fits_80_columns_and_cuts_no_word() -> None:
    console = Console(record=True, width=80, file=io.StringIO())
    replicas = [
        pb.ReplicaStatus(
            id=f"5drh0vsd.e90a0{number}",
            residents=128,
            batches_in_flight=2,
            kv_blocks=1_234_567,
            kv_blocks_free=1_234_567,
            context_len=131_072,
            target="/models/a-target",
            dtype="bfloat16",
            device="cuda:0",
            draining=number == 1,
            cost_estimates=pb.CostEstimates(draft_len=12, step_s=0.0123),
        )
        for number in range(2)
    ]
    shards = [
        pb.ShardStatus(name="pool-0a1b2c3d-0", serving=3, outstanding_tokens=1_234_567),
        pb.ShardStatus(name="pool-0a1b2c3d-1", silent=True),
    ]
    console.print(shown(pb.StatusResponse(replicas=replicas, shards=shards)))
    text = console.export_text()
    assert "…" not in text
    assert "2 replicas: a-target, bfloat16 on cuda:0; drafter none; context 131072" in text
    assert "draining: 5drh0vsd.e90a01" in text
    assert re.search(r"5drh0vsd.e90a00 +128 +2 +100% of 1234567 +12 +12.3 ms +0% / 0%", text)
    assert re.search("pool-0a1b2c3d-1 +silent", text)
