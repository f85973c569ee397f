"""Proves: a Ray that is begun here is this user's alone, and workers import nothing of where it was
begun; a Ray of others is joined only where it is this user's to say so.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private.authentication import authentication_token_setup as tokens

from cluster import own_ray

ADDRESS = "RAY_ADDRESS"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user without a token of Ray, in a directory of his own."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR", ADDRESS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr(own_ray, "_FOLDER_BYTES_MAX", 1000)
    tokens.AuthenticationTokenLoader.instance().reset_cache()
    (tmp_path / "home").mkdir()
    (tmp_path / "downloaded").mkdir()
    monkeypatch.chdir(tmp_path / "downloaded")
    return tmp_path / "home"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `ray.init` was told, and where it was called."""
    calls: list[dict[str, Any]] = []

    def init(address: str | None = None, **options: Any) -> None:
        calls.append({"address": address, "cwd": Path.cwd(), **options})

    monkeypatch.setattr(ray, "init", init)
    return calls


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_rays_files_are_below_a_directory_that_other_users_cannot_enter(
    begun: list[dict[str, Any]], tmp_path: Path
) -> None:
    for _ in range(2):
        own_ray.begin(include_dashboard=False)
    for call in begun:
        folder = Path(call["_temp_dir"]).parent
        assert (folder.parent, mode(folder)) == (tmp_path, 0o700)
        assert (call["address"], call["include_dashboard"]) == ("local", False)
        # Workers start where Ray does: no file lies there, and none can be put there.
        assert call["cwd"].parent == folder
        assert (list(call["cwd"].iterdir()), mode(call["cwd"])) == ([], 0o500)
    assert Path.cwd() == tmp_path / "downloaded"


def test_a_long_path_gives_way_to_one_that_sockets_can_have(
    begun: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    session = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
    assert len(os.fsencode(own_ray._private_folder() / session)) <= 107


@pytest.mark.parametrize("found", ["open", "a link", "a file", "another's"])
def test_a_directory_that_others_may_have_made_is_refused(
    begun: list[dict[str, Any]], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"lockstep-{os.geteuid()}"
    if found == "a link":
        (tmp_path / "elsewhere").mkdir(0o700)
        path.symlink_to(tmp_path / "elsewhere")
    elif found == "a file":
        path.touch()
    else:
        path.mkdir(0o700)
    if found == "open":
        path.chmod(0o770)
    elif found == "another's":
        lstat = Path.lstat
        owned = SimpleNamespace(st_mode=lstat(path).st_mode, st_uid=os.geteuid() + 1)
        monkeypatch.setattr(Path, "lstat", lambda asked: owned if asked == path else lstat(asked))
    with pytest.raises(OSError, match=path.name):
        own_ray.begin()
    assert begun == []


def test_the_token_is_for_this_user_only_whoever_made_it(
    begun: list[dict[str, Any]], home: Path
) -> None:
    own_ray.begin()
    file = home / ".ray" / "auth_token"
    token = file.read_text()
    assert (mode(file), mode(file.parent), len(token) >= 32) == (0o600, 0o700, True)
    file.chmod(0o644)
    own_ray.begin()
    assert (mode(file), file.read_text()) == (0o600, token)


@pytest.mark.parametrize("name", ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN"])
def test_no_token_is_made_where_the_user_has_said_something_else(
    begun: list[dict[str, Any]], home: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "disabled")
    own_ray.begin()
    assert len(begun) == 1
    assert not (home / ".ray").exists()


@pytest.mark.parametrize("connect", [own_ray.begin, own_ray.join])
def test_workers_get_no_path_of_the_driver(connect: Any, begun: list[dict[str, Any]]) -> None:
    connect()
    job = begun[0]["job_config"]
    # As `ray.init` adds the working directory and that of the script.
    job._py_driver_sys_path.extend(["/downloaded", "/scripts"])
    assert list(job._get_proto_job_config().py_driver_sys_path) == []


def test_relative_paths_for_workers_are_those_of_this_process(
    begun: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty entry of PYTHONPATH would be the directory where a worker starts."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "mine", "/theirs", ""]))
    monkeypatch.setenv("HF_HOME", "hub")
    monkeypatch.setenv("HF_HUB_CACHE", "~/cache")
    own_ray.begin()
    here = tmp_path / "downloaded"
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(here / "mine"), "/theirs"])
    assert os.environ["HF_HOME"] == str(here / "hub")
    assert os.environ["HF_HUB_CACHE"] == str(tmp_path / "home" / "cache")


def test_a_ray_is_there_if_the_environment_or_a_file_of_this_users_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not own_ray.is_there()
    for address, there in (("local", False), ("auto", True), ("192.0.2.1:6379", True)):
        monkeypatch.setenv(ADDRESS, address)
        assert own_ray.is_there() is there
    monkeypatch.delenv(ADDRESS)
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text("192.0.2.1:6379")
    assert own_ray.is_there()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    monkeypatch.setattr(Path, "stat", lambda _file: SimpleNamespace(st_uid=uid + 2))
    with pytest.raises(PermissionError, match=ADDRESS):
        own_ray.is_there()
