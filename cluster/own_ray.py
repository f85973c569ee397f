"""Connects this process to a Ray: it begins one for this user alone, or joins one that is there.

Says where a Ray of our own keeps its files and where its workers start. The directory in which a
command is typed comes on no worker's import path: beside a model that was downloaded there may lie
any `json.py`. Knows neither Serve nor the cluster's settings.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_default_system_temp_dir, get_ray_address_file
from ray._private.authentication.authentication_token_generator import (
    generate_new_authentication_token,
)
from ray._private.authentication.authentication_token_setup import (
    AuthenticationTokenLoader,
    _get_default_token_path,
)
from ray.job_config import JobConfig

_FOLDER_BYTES_MAX = 107 - len(
    "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
)
"""The path of a Unix socket has at most 107 bytes."""
_PATHS = ("HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE")
"""Variables with a path that workers read, too."""


class _ImportsNothingOfTheDriver(JobConfig):  # type: ignore[misc]
    """Workers find modules by their own PYTHONPATH and installation.

    Ray would add this process's working directory and the directory of its script, in front of
    all others.
    """

    def _get_proto_job_config(self) -> Any:
        self._py_driver_sys_path.clear()
        return super()._get_proto_job_config()


def is_there() -> bool:
    """Whether there is a Ray to join, where `ray.init` looks: in RAY_ADDRESS, then on this machine.

    Raises PermissionError if another user says that there is one.
    """
    if named := os.environ.get("RAY_ADDRESS"):
        return named != "local"
    file = Path(get_ray_address_file(None))
    try:
        owner = file.stat().st_uid
    except FileNotFoundError:
        return False
    if owner not in (0, os.geteuid()):
        raise PermissionError(
            f"{file} belongs to another user: set RAY_ADDRESS to the Ray to join, or to 'local'"
        )
    return True


def join(**options: Any) -> None:
    """Connect to the Ray that `is_there`."""
    # A client (ray://) is no driver: its server is, with a path of its own.
    if "://" not in os.environ.get("RAY_ADDRESS", ""):
        options["job_config"] = _ImportsNothingOfTheDriver()
    ray.init(**options)


def begin(**options: Any) -> None:
    """Start a Ray and connect to it. Its processes start in an empty directory.

    Raises OSError, with a sentence, where no directory can be had that other users cannot enter.
    """
    folder = _private_folder()
    empty = folder / "empty"
    empty.mkdir(0o500, exist_ok=True)
    os.environ.update(_absolute_paths())
    _make_token()
    with contextlib.chdir(empty):
        # A folder below the private one: Ray opens its own to all users.
        ray.init(
            "local",
            _temp_dir=str(folder / "ray"),
            job_config=_ImportsNothingOfTheDriver(),
            **options,
        )


def _private_folder() -> Path:
    name = f"lockstep-{os.geteuid()}"
    path = Path(get_default_system_temp_dir(), name).absolute()
    if len(os.fsencode(path)) > _FOLDER_BYTES_MAX:
        path = Path("/tmp", name)
    path.mkdir(0o700, exist_ok=True)
    found = path.lstat()
    # Users who made it or can write to it may have put anything there.
    closed = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not closed or found.st_uid != os.geteuid():
        raise PermissionError(
            f"{path}: must be a directory of this user with mode 0700; remove it, or set RAY_TMPDIR"
            " to another place"
        )
    return path


def _absolute_paths() -> dict[str, str]:
    """Variables that name places relative to this process's working directory, made absolute."""
    # The hub's library reads a user's directory and variables in them.
    given = {name: os.path.expandvars(os.environ.get(name, "")) for name in _PATHS}
    found = {name: str(Path(path).expanduser().absolute()) for name, path in given.items() if path}
    if path := os.environ.get("PYTHONPATH"):
        # An empty entry, as a colon at the end leaves one, is wherever a process starts.
        entries = filter(None, path.split(os.pathsep))
        found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, entries))
    return found


def _make_token() -> None:
    """Make the token that Ray's ports ask for where Ray would: Ray's own file is open to all."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    file = _get_default_token_path()
    loader = AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            os.fchmod(descriptor, 0o600)
            opened.write(generate_new_authentication_token())
        loader.reset_cache()
    elif file.exists() and (found := file.stat()).st_uid == os.geteuid():
        # One that Ray has made.
        file.chmod(found.st_mode & 0o600)
