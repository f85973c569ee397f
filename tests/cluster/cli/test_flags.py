"""Proves: flags become the settings they name, over those of a file, for every command that takes
what drafts in the same words, and a wrong value is a sentence with the flag, the value and what is
allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from cluster import verify
from cluster.bench import session
from cluster.cli import plan, serve as cli_serve
from cluster.config import ClusterConfig
from cluster.frontend.admission.keys import hash_of
from replicas.config import SpeculativeConfig
from tests.cluster.cli.command import lockstep


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    """The settings with which `lockstep serve` would have started."""
    configs: list[ClusterConfig] = []

    def start(config: ClusterConfig, verbose: bool, replace: bool) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(cli_serve, "serve_until_signal", start)
    return configs


def test_flags_go_before_a_file_and_leave_the_rest_of_it(
    tmp_path: Path, served: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "replica: {target: a}\nscheduler: {rows_max: 2, wait_rounds: 7}\npool: {shards: 3}\n"
    )
    (tmp_path / "keys.yaml").write_text("[]\n")
    monkeypatch.chdir(tmp_path)
    flags = [
        *("--config", str(path), "--rows-max", "5", "--speculative-config", "none"),
        *(
            "--no-calibrate",
            "--pool-config",
            json.dumps({"lease_s": 9}),
            "--memory",
            "20MiB",
            "--grpc-port",
            "9001",
        ),
        *("--autoscaling-config", json.dumps({"max_replicas": 7}), "--keys-file", "keys.yaml"),
        *("--http-hosts", "a.example, b.example"),
    ]
    lockstep("serve", *flags)
    (config,) = served
    assert (config.scheduler.rows_max, config.scheduler.wait_rounds) == (5, 7)
    assert (config.replica.target, config.replica.calibrate) == ("a", False)
    assert config.replica.drafting.method == "none"
    assert (config.pool.shards, config.pool.lease_s, config.server.grpc_port) == (3, 9.0, 9001)
    assert config.replica.memory == 20 << 20
    assert config.replicas_max == 7
    assert config.server.http_hosts == ("a.example", "b.example")
    assert config.auth.keys_file == str(tmp_path / "keys.yaml")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["serve"], {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}),
        (["verify", "--prompts", __file__], {"method": "none"}),
        (["bench", "--engine"], {"method": "eagle3", "model": "planted:head"}),
        (["plan"], {"method": "draft_model", "model": "tiny", "num_speculative_tokens": 8}),
    ],
)
def test_a_command_drafts_by_what_a_flag_says_or_else_a_file(
    command: list[str], said: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    used: list[SpeculativeConfig] = []

    def end(config: Any) -> None:
        """Where the command would load a replica of these settings."""
        used.append(getattr(config, "replica", config).drafting)
        raise typer.Exit

    monkeypatch.setattr(cli_serve, "serve_until_signal", lambda config, *_: end(config))
    monkeypatch.setattr("cluster.prompt_files.read_prompts", lambda *_: ["x"])
    monkeypatch.setattr(verify, "verify", lambda _, config, *__: end(config))
    monkeypatch.setattr(session, "engine", lambda config, _: end(config))
    monkeypatch.setattr(plan, "print_plan", lambda config, _: end(config))
    path = tmp_path / "settings.yaml"
    path.write_text(
        "replica:\n  target: x/y\n"
        "  speculative_config: {method: suffix, num_speculative_tokens: 3}\n"
    )
    for flags in (["--speculative-config", json.dumps(said)], []):
        lockstep(*command, "--config", str(path), *flags)
    of_the_file = SpeculativeConfig(method="suffix", num_speculative_tokens=3)
    assert used == [SpeculativeConfig(**said), of_the_file]


def test_the_word_none_is_the_method_and_null_the_default(
    served: list[ClusterConfig], tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    for text in ("none", "null"):
        path.write_text(f"replica: {{target: x/y, speculative_config: {text}}}\n")
        lockstep("serve", "--config", str(path))
    for text in ("none", "null"):
        lockstep("serve", "x/y", f"--speculative-config={text}")
    methods = ["none", "suffix", "none", "suffix"]
    assert [config.replica.drafting.method for config in served] == methods


def test_flags_of_other_servers_are_settings(served: list[ClusterConfig]) -> None:
    flags = [
        *("org/model", "--host", "127.0.0.2", "--port", "8001", "--max-model-len", "512"),
        *("--max-num-seqs", "3", "--tensor-parallel-size", "2", "--served-model-name", "ours"),
        *("--gpu-memory-utilization", "0.5", "--seed", "7"),
    ]
    lockstep("serve", *flags)
    (config,) = served
    assert (config.server.http_host, config.server.http_port) == ("127.0.0.2", 8001)
    assert (config.replica.context_len, config.scheduler.rows_max) == (512, 3)
    assert (config.replica.tensor_parallel, config.replica.gpu_memory_utilization) == (2, 0.5)
    assert (config.replica.target, config.model_name) == ("org/model", "ours")
    assert config.seed == 7


def test_a_revision_is_part_of_the_target_and_not_of_its_name(
    served: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a target on the hub; another has none."""
    for target in ("org/model", "word"):
        lockstep("serve", target, "--revision", "v1")
        config = served.pop()
        assert (config.replica.target, config.model_name) == (f"{target}@v1", target)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    here = ("folder", "./folder", "file.gguf", "demo", "smollm2", "tiny", "planted:tiny")
    for target in (*here, "org/model:file.gguf", "org/model@v2"):
        assert "--revision: '" in lockstep("serve", target, "--revision", "v1", code=2)
    assert served == []


def test_paths_that_are_here_are_found_from_elsewhere_too(
    served: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By Ray's processes; clients know the target by the name that was given."""
    for name in ("models/a", "b", "tiny"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "template").touch()
    monkeypatch.chdir(tmp_path)
    config = {"method": "draft_model", "model": "b", "num_speculative_tokens": 3}
    flags = ["--speculative-config", json.dumps(config)]
    tiny = ["--speculative-config", json.dumps(config | {"model": "tiny"})]
    for args in (["models/a", "--chat-template", "template"], ["tiny"]):
        lockstep("serve", *args, *flags)
    lockstep("serve", "x/y", *tiny)
    replicas = [config.replica for config in served]
    assert [(replica.target, replica.drafting.model) for replica in replicas] == [
        (str(tmp_path / "models" / "a"), str(tmp_path / "b")),
        ("tiny", str(tmp_path / "b")),
        ("x/y", "tiny"),
    ]
    assert [config.model_name for config in served] == ["models/a", "tiny", "x/y"]
    assert replicas[0].drafting.num_speculative_tokens == 3
    assert replicas[0].chat_template == str(tmp_path / "template")


def test_of_a_key_the_settings_have_the_hash(
    served: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep("serve", "--api-key", "one")
    monkeypatch.setenv("LOCKSTEP_API_KEY", "two")
    lockstep("serve", "--host", "0.0.0.0")
    assert "LOCKSTEP_API_KEY" not in os.environ
    monkeypatch.setenv("LOCKSTEP_API_KEY", "two")
    lockstep("serve", "--allow-anyone")
    hashes = [config.auth.api_key_sha256 for config in served]
    assert hashes == [hash_of("one"), hash_of("two"), None]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rows-max", "0"], "--rows-max: must be at least 1, is '0'"),
        (["--dtype", "int8"], "--dtype: must be 'auto', 'float32', 'bfloat16' or 'float16', is"),
        (["--memory", "much"], "--memory: must be a size in bytes, as 512MiB, is 'much'"),
        (["--autoscaling-config", "{"], "--autoscaling-config: not JSON: "),
        (["--speculative-config", "{"], "--speculative-config: not JSON: "),
        (
            ["--speculative-config", "sufix"],
            "--speculative-config: method: must be 'draft_model', 'suffix', 'eagle3', 'dflash',"
            " 'dspark', 'clover' or 'none', is 'sufix'",
        ),
        (
            ["--speculative-config", '{"method": "suffix", "num_speculative_tokens": 12}'],
            "must be at most scheduler.draft_len_max (8), is 12",
        ),
        (["--replicas", "0", "--dtype", "x"], "--replicas: must be at least 1, is '0'; --dtype: "),
        (["--http-host", "0.0.0.0"], "--allow-anyone"),
        (["--seed", str(2**63)], "--seed: must be below 9223372036854775808"),
        (["--api-key", "a b"], "--api-key: an API key must be"),
        (["--chat-template", "nowhere.jinja"], "nowhere.jinja"),
        (["--chat-template", "FOLDER/latin"], "latin: not UTF-8"),
        (["--chat-template", "FOLDER/broken"], "chat_template: no chat template in Jinja: line"),
        (["--config", "FOLDER/wrong.yaml"], "scheduler.rows: unknown name; did you mean rows_max?"),
        (["--api-key", "a", "--allow-anyone"], "api_key_sha256 and allow_anyone contradict"),
    ],
)
def test_a_wrong_value_is_a_sentence(
    flags: list[str], said: str, served: list[ClusterConfig], tmp_path: Path
) -> None:
    (tmp_path / "wrong.yaml").write_text("scheduler: {rows: 4}\n")
    (tmp_path / "latin").write_bytes(b"\xff")
    (tmp_path / "broken").write_text("{% for m in messages %}")
    flags = [flag.replace("FOLDER", str(tmp_path)) for flag in flags]
    assert said in lockstep("serve", *flags, code=2)
    assert served == []


def test_a_key_on_the_command_line_is_not_what_ray_keeps_of_it() -> None:
    """Nor what others on this machine see in the list of processes."""
    code = (
        "from cluster.cli.serve import hide_key; hide_key()\n"
        "from ray._private.utils import get_entrypoint_name; print(get_entrypoint_name())"
    )
    flags = ["serve", "x", "--api-key", "secret-1", "--api-key=secret-2", "--port", "8001"]
    args = [sys.executable, "-c", code, *flags]
    said = subprocess.run(args, capture_output=True, check=True, text=True).stdout
    assert "secret" not in said
    assert "serve x --api-key *** --api-key=*** --port 8001" in said
