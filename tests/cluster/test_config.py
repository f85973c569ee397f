"""Proves: settings come from sections and files; every wrong key is named, and every old one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.config import INSTEAD, RENAMED, ClusterConfig, ConfigError
from cluster.config_sources import from_args, from_file, overridden, server_address
from cluster.frontend.admission.control import check_exposure
from cluster.frontend.admission.keys import read as read_keys
from tests.cluster.cli.command import lockstep

NAME = "replica.speculative_config"


def test_strings_from_a_command_line_and_the_environment_become_values() -> None:
    said = {"replicas": "2", "replica.target": "x", "replica.memory": "null", "replica": None}
    config = from_args(said | {"server.grpc_port": "9001"})
    assert (config.replicas, config.replica.target, config.replica.memory) == (2, "x", None)
    assert config.server.grpc_port == 9001
    assert server_address({}) == "localhost:9000"
    assert server_address({"LOCKSTEP_ADDRESS": "there:1"}) == "there:1"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"replica.targt": "x"}, "replica.targt: unknown name; did you mean target?"),
        ({"pool": {"leas_s": 1}}, "pool.leas_s: unknown name; did you mean lease_s?"),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "autoscaling: min_replicas"),
        ({"autoscaling": {"drain_s": float("nan")}}, "drain_s: must be a finite number, is nan"),
        ({"replicas": "many"}, "replicas: must be a whole number, is 'many'"),
        ({"pool": {"lease_s": -1}}, "pool.lease_s: must be above 0, is -1"),
        ({"replica.device": "gpu"}, "replica.device: must be auto, cpu, cuda or cuda:N, is 'gpu'"),
        ({"server.http_host": ""}, "server.http_host: must have a character at least, is ''"),
        ({"auth": {"allow_anyone": "maybe"}}, "allow_anyone: must be true or false, is 'maybe'"),
        ({"scheduler.draft_len": 2, "scheduler": {"draft_len": 3}}, "scheduler.draft_len: given"),
        ({"scheduler": "fast", "scheduler.draft_len": 2}, "scheduler.draft_len: given twice"),
        (
            {"replica": {"tensor_parallel": 2}, "actors": {"replica_gpus": 0.5}},
            "actors.replica_gpus: a rank needs a GPU of its own, not 0.5",
        ),
        ({"auth": {"keys_file": "keys.yaml"}}, "auth.keys_file"),
        (
            {"frontend": {"timeout_s": 7200}},
            "frontend.timeout_s: must be at most scheduler.timeout_s_max (3600), is 7200",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named(args: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        from_args(args)


def test_settings_that_cannot_share_a_pool_name_different_ones() -> None:
    settings: list[dict[str, object]] = [
        {},
        {"replica.target": "x"},
        {"replica.dtype": "bfloat16"},
        {"replica.context_len": 64},
        {"scheduler.draft_len": 2},
        {"pool": {"lease_s": 9}},
    ]
    names = [from_args(args).pool_name for args in settings]
    assert len(set(names)) == len(names)
    assert from_args({}).pool_names == (names[0],)
    same = {"server.grpc_port": 9001, "autoscaling": {"max_replicas": 4}}
    assert from_args(same).pool_name == names[0]


def test_a_file_may_be_serves_an_empty_one_is_the_defaults_and_a_bad_one_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "grpc_options: {port: 9100}\nhttp_options: {host: 0.0.0.0, port: 8100}\n"
        "applications:\n- import_path: cluster.app:build\n  args: {replicas: 2}\n"
    )
    server = {"grpc_port": 9100, "http_host": "0.0.0.0", "http_port": 8100}
    assert from_file(path) == from_args({"replicas": 2, "server": server})
    path.write_text("")
    config = from_file(path)
    assert config == ClusterConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.replicas = 3  # type: ignore[misc]
    wrong = [b"- a", b"a: [", b"a: !!bool x", b"nonsense: 1\n", b"\xff", b"seed: 2021-13-40"]
    for bad in [*wrong, b"applications: {a: 1}", b"applications: []\ngrpc_options: 5"]:
        path.write_bytes(bad)
        with pytest.raises(ConfigError):
            from_file(path)


BOMB = "a: &a0 [x, x]\n" + "".join(f"b{n}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(30))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "line 2: aliases (*name) are not read"),
        ("a: &a [*a]", "line 1: aliases (*name) are not read"),
        ("a: [" + "1," * 200_000 + "]", "line 1: more than 100000 values"),
        ("#" * (1 << 20) + "\n", "more than 1 MiB"),
        ("a: 1\nb: [", "line 2: not YAML: "),
    ],
)
def test_a_file_that_would_take_much_memory_is_refused_in_a_sentence(
    tmp_path: Path, text: str, said: str
) -> None:
    """So is one that is no YAML; the sentence repeats nothing of it."""
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    for read in (from_file, read_keys):
        with pytest.raises(ConfigError) as refused:
            read(path)
        assert str(refused.value).startswith(f"{path}: {said}")
        assert "\n" not in str(refused.value)


def test_a_name_that_is_no_more_is_refused_with_the_one_to_use() -> None:
    """Each of a section, at the top, where it also may have stood, and as a flag."""
    assert set(RENAMED) < set(INSTEAD)
    for old, new in INSTEAD.items():
        section, _, name = old.rpartition(".")
        told = re.escape(f"{old}: unknown name; use {new}")
        for args in ({old: "1"}, {section: {name: "1"}} if section else {name: "1"}):
            with pytest.raises(ConfigError, match=f"^{told}$"):
                from_args(args)
        place, _, name = (f"{section}.{new}" if section else new).partition(".")
        assert name in type(getattr(ClusterConfig(), place)).model_fields


def test_a_flag_that_is_no_more_is_refused_with_the_one_to_use() -> None:
    for old, new in RENAMED.items():
        flag, use = ("--" + name.rpartition(".")[2].replace("_", "-") for name in (old, new))
        command = "plan" if old.startswith("replica") else "simulate"
        said = " ".join(lockstep(command, flag, "1", code=2).split())
        assert f"Invalid value for '{flag}': no such option; use {use}" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "10.0.0.1", "lockstep.example"])
def test_a_server_for_others_has_keys_or_says_that_anyone_may_come(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.http_host: .*--keys-file.*--allow-anyone"):
        check_exposure(from_args({"server.http_host": host}))
    for own in ("127.0.0.1", "127.3.2.1", "::1", "localhost"):
        check_exposure(from_args({"server.http_host": own}))
    for allowed in ({"auth.keys_file": "/etc/keys.yaml"}, {"auth.allow_anyone": True}):
        check_exposure(from_args({"server.http_host": host, **allowed}))


def test_a_replicas_memory_is_to_last_for_the_schedulers_batches() -> None:
    config = from_args({"scheduler": {"rows_max": 3, "draft_len": 2, "draft_len_max": 5}})
    planned = config.planned_replica
    # No request gets more than a length that the server fixes.
    assert (planned.plan_rows, planned.plan_draft_len, planned.plan_prefill_rows) == (3, 2, 8)
    chosen = from_args({"scheduler": {"draft_len_max": 5}}).planned_replica
    assert chosen.plan_draft_len == 5
    pinned = from_args({"replica": {"plan_rows": 2}, "scheduler.draft_len": 12}).planned_replica
    assert (pinned.plan_rows, pinned.plan_draft_len) == (2, 12)


@pytest.mark.parametrize(
    ("now", "method"),
    [
        ({"speculative_config": '{"method": "eagle3", "model": "b"}'}, "eagle3"),
        ({"speculative_config": "none"}, "none"),
        ({"target": "b"}, "suffix"),
    ],
)
def test_what_drafts_is_overridden_as_a_whole(now: dict[str, object], method: str) -> None:
    drafting = {"method": "suffix", "num_speculative_tokens": 3}
    before = from_args({"replica": {"target": "a", "speculative_config": drafting}})
    after = overridden(before, {"replica": now}).replica.drafting
    assert after.method == method
    assert after.num_speculative_tokens == (3 if method == "suffix" else None)


def test_what_drafts_may_be_json_or_a_method_as_a_command_line_gives_it() -> None:
    said = from_args({NAME: '{"method": "suffix", "num_speculative_tokens": 4}'})
    assert said == from_args({NAME: {"method": "suffix", "num_speculative_tokens": 4}})
    alone = [from_args({NAME: said}) for said in ("Suffix", {"method": "suffix"})]
    assert alone[0] == alone[1]
    with pytest.raises(ConfigError, match=f"{NAME}: not JSON"):
        from_args({NAME: "{suffix}"})
