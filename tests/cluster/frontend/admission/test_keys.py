"""Proves: the file of keys holds hashes only, changes all at once, and counts only when sound."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli.main import main
from cluster.frontend.admission.keys import (
    PREFIX,
    KeysError,
    KeysFile,
    add,
    find,
    hash_of,
    parse,
    read,
    remove,
)
from scheduler.messages import Priority
from tests.cluster.cli.command import lockstep
from tests.cluster.fakes import Clock

HASH = "a" * 64
OTHER = "b" * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_every_key_finds_its_own_entry_and_what_is_no_key_none(path: Path) -> None:
    keys = {name: add(path, name) for name in ("alice", "bob", "carol")}
    entries = read(path)
    for name, key in keys.items():
        assert [entry.name for entry in entries if find(entries, key) == entry] == [name]
    key = keys["alice"]
    odd = ("\ud800", "\x00", "é" * 10_000)
    for wrong in ("", key[:-1], key + "x", key.lower(), hash_of(key), *odd):
        assert find(entries, wrong) is None


def test_a_new_file_is_for_its_owner_only_and_a_change_keeps_mode_and_link(path: Path) -> None:
    before = os.umask(0)
    try:
        add(path, "alice")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    link = path.with_name("link.yaml")
    link.symlink_to(path)
    add(link, "bob")
    remove(link, "alice")
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in read(path)] == ["bob"]


def test_a_change_that_fails_leaves_the_old_version_and_nothing_else(path: Path) -> None:
    add(path, "alice")
    before = path.read_bytes()
    for wrong in ("alice", "../x", "", "x" * 65, "a b"):
        with pytest.raises(KeysError, match=r"name: (must be 1 to 64 of|there is a key)"):
            add(path, wrong)
    with pytest.raises(KeysError, match="nobody"):
        remove(path, "nobody")
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_two_commands_at_once_do_not_undo_each_other(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(KeysError, match="another command"):
            add(path, "alice")
    finally:
        os.close(folder)
    add(path, "alice")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "expected a list"),
        ("- [", "line 1"),
        ("- 2021-13-40", "not YAML"),
        ("[" * 5000, "not YAML"),
        (f"- {{sha256: {HASH}}}", "0.name"),
        ("- {name: x}", "0.sha256"),
        (f"- {{name: x, sha256: {HASH[1:]}}}", "0.sha256"),
        (f"- {{name: x, sha256: {HASH.upper()}}}", "0.sha256"),
        (f"- {{name: x/y, sha256: {HASH}}}", "0.name"),
        (f"- {{name: x, sha256: {HASH}, colour: red}}", "unknown name"),
        (f"- {{name: x, sha256: {HASH}, priority_max: top}}", "0.priority_max"),
        (f"- {{name: x, sha256: {HASH}, tokens_per_minute: 0}}", "0.tokens_per_minute"),
        (f"- {{name: x, sha256: {HASH}, requests_max: many}}", "0.requests_max"),
        (f"- {{name: x, sha256: {HASH}}}\n- {{name: x, sha256: {OTHER}}}", "1.name"),
        (f"- {{name: x, sha256: {HASH}}}\n- {{name: y, sha256: {HASH}}}", "1.sha256"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, named: str) -> None:
    with pytest.raises(KeysError, match=named.replace(".", r"\.")):
        parse(text)


@pytest.mark.parametrize("text", ["- {sha256: %s}", "%s: [", "- %s", "- {%s: x}", "{a: b: %s}"])
def test_a_key_that_was_pasted_into_the_file_is_in_no_message(text: str) -> None:
    pasted = PREFIX + "q" * 43
    with pytest.raises(KeysError) as caught:
        parse(text % pasted)
    assert "qqq" not in str(caught.value)


def test_a_new_version_counts_within_a_second_and_no_look_comes_sooner(path: Path) -> None:
    clock = Clock()
    add(path, "alice")
    known = KeysFile(path, clock)
    add(path, "bob")
    clock.now_s = 0.9
    assert [entry.name for entry in known.entries()] == ["alice"]
    clock.now_s = 1.0
    assert [entry.name for entry in known.entries()] == ["alice", "bob"]
    remove(path, "alice")
    clock.now_s = 2.0
    assert [entry.name for entry in known.entries()] == ["bob"]


@pytest.mark.parametrize("broken", [b"- [", b"", b"- {name: x}", None, b"\xff\xfe"])
def test_a_broken_version_keeps_the_old_keys_and_says_so(
    path: Path, broken: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    add(path, "alice")
    known = KeysFile(path, clock)
    sound = path.read_text()
    if broken is None:
        path.unlink()
    else:
        path.write_bytes(broken)
    for clock.now_s in (1.0, 2.0, 3.0):
        assert [entry.name for entry in known.entries()] == ["alice"]
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1, "said once"
    path.write_text(sound.replace("alice", "carol"))
    clock.now_s = 4.0
    assert [entry.name for entry in known.entries()] == ["carol"]


# --------------------------------------------------------------------------- the command


def test_the_command_prints_the_key_alone_and_once(path: Path) -> None:
    limits = ["--priority-max", "low", "--tokens-per-minute", "600", "--requests-max", "7"]
    made = CliRunner().invoke(main, ["keys", "add", "alice", "--file", str(path), *limits])
    key = made.stdout.strip()
    assert key.startswith(PREFIX)
    assert len(key) == len(PREFIX) + 43, "32 bytes in base64"
    assert key.removeprefix(PREFIX) not in path.read_text(), "only its hash is stored"
    entry = find(read(path), key)
    assert (entry.name, entry.priority) == ("alice", Priority.LOW)
    assert (entry.tokens_per_minute, entry.requests_max) == (600, 7)
    listed = lockstep("keys", "list", "--file", str(path))
    for said in ("alice", "low", "600 tokens", "7 requests"):
        assert said in listed
    assert key not in listed
    assert hash_of(key) not in listed
    lockstep("keys", "remove", "alice", "--file", str(path))
    assert read(path) == ()


@pytest.mark.parametrize(
    "said",
    ["add a/b", "add x --tokens-per-minute 0", "add x --priority-max top", "remove x", "list"],
)
def test_the_command_refuses_what_makes_no_sense(path: Path, said: str) -> None:
    lockstep("keys", *said.split(), "--file", str(path), code=2)
    assert not path.exists()


def test_the_server_does_not_start_with_keys_that_make_no_sense(path: Path) -> None:
    assert "No such file" in lockstep("serve", "--keys-file", str(path), code=2)
    path.write_text("- {name: x}\n")
    assert "sha256" in lockstep("serve", "--keys-file", str(path), code=2)
