"""The file of API keys: what stands in it, how it is read again, how keys come and go.

It holds hashes, never keys. Knows neither calls nor what their callers have used up.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from cluster.config import ConfigError
from cluster.config_sources import text_of, yaml_of
from cluster.error_messages import joined, problems
from scheduler.messages import Priority

log = logging.getLogger("lockstep.keys")

PREFIX = "lsk_"
"""Begins every key, so that people and secret scanners recognise one."""
_KEY_BYTES = 32
_LOOK_S = 1.0
"""The file is looked at no more often than this."""
_MODE = 0o600
_HEADER = "# API keys of Lockstep, made by `lockstep keys`. Holds hashes, never keys.\n"


class KeysError(ConfigError):
    """A file of keys that makes no sense. The message names entry and field, never what else
    stands there."""


class KeyEntry(BaseModel):
    """What is known of one key."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(
        pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}$",
        description="Name of the tenant; its clients can see it, logs never have it.",
    )
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="Hash of the key, in hex.")
    priority_max: Literal["high", "normal", "low"] = Field(
        "normal", description="Highest priority class that its requests may have."
    )
    tokens_per_minute: int | None = Field(
        None, ge=1, description="Limit of prompt and new tokens per minute. Default: no limit."
    )
    requests_max: int | None = Field(
        None, ge=1, description="Limit of requests in flight. Default: no limit."
    )
    operator: bool = Field(False, description="The key also opens the metrics and the dashboard.")

    @property
    def priority(self) -> Priority:
        return Priority[self.priority_max.upper()]


_ENTRIES: TypeAdapter[list[KeyEntry]] = TypeAdapter(list[KeyEntry])


def hash_of(key: str) -> str:
    """SHA-256 in hex. Enough without salt or stretching: a key is 32 random bytes, no password."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def find(entries: Sequence[KeyEntry], key: str) -> KeyEntry | None:
    """The entry of `key`. Takes as long whichever entry it is, and whether or not there is one."""
    wanted = hash_of(key)
    found = None
    for entry in entries:
        if hmac.compare_digest(entry.sha256, wanted):
            found = entry
    return found


def parse(text: str) -> tuple[KeyEntry, ...]:
    """Raises KeysError."""
    try:
        data = yaml_of(text)
    except ConfigError as error:
        raise KeysError(str(error)) from None
    if not isinstance(data, list):
        raise KeysError("expected a list of keys ([] for none)")
    try:
        entries = _ENTRIES.validate_python(data)
    except ValidationError as error:
        raise KeysError(joined(problems(error, KeyEntry, values=False))) from None
    for field in ("name", "sha256"):
        values = [getattr(entry, field) for entry in entries]
        for index, value in enumerate(values):
            if value in values[:index]:
                raise KeysError(f"{index}.{field}: the same as in entry {values.index(value)}")
    return tuple(entries)


def read(path: Path) -> tuple[KeyEntry, ...]:
    """Raises KeysError, and OSError for a file that cannot be read."""
    try:
        text = text_of(path)
    except ConfigError as error:
        raise KeysError(str(error)) from None
    try:
        return parse(text)
    except KeysError as error:
        raise KeysError(f"{path}: {error}") from None


class KeysFile:
    """The keys that count now. A new version of the file counts within a second, if it is sound."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises KeysError or OSError if the first version is not sound."""
        self._path = path
        self._clock = clock
        self._looked_s = clock()
        self._version = _version(path)
        self._entries = read(path)

    def entries(self) -> tuple[KeyEntry, ...]:
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._look()
        return self._entries

    def _look(self) -> None:
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._entries = read(self._path)
        except (KeysError, OSError) as error:
            log.error("the API keys stay as they were: %s", error)
        else:
            log.info("%d API keys read from %s", len(self._entries), self._path)


def _version(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_ino, found.st_size, found.st_mtime_ns)


# --------------------------------------------------------------------------- adding, removing


def add(
    path: Path,
    name: str,
    priority_max: str = "normal",
    tokens_per_minute: int | None = None,
    requests_max: int | None = None,
    operator: bool = False,
) -> str:
    """Make a key, store its hash, return the key. Raises KeysError and OSError."""
    key = PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    fields = {
        "name": name,
        "sha256": hash_of(key),
        "priority_max": priority_max,
        "tokens_per_minute": tokens_per_minute,
        "requests_max": requests_max,
        "operator": operator,
    }
    try:
        entry = KeyEntry.model_validate(fields)
    except ValidationError as error:
        raise KeysError(joined(problems(error, KeyEntry))) from None
    with _alone(path):
        entries = read(path) if path.exists() else ()
        if any(known.name == name for known in entries):
            raise KeysError(f"name: there is a key {name!r} already")
        _write(path, [*entries, entry])
    return key


def remove(path: Path, name: str) -> None:
    """Raises KeysError for a name that is not there, and OSError."""
    with _alone(path):
        entries = read(path)
        left = [entry for entry in entries if entry.name != name]
        if len(left) == len(entries):
            raise KeysError(f"name: there is no key {name!r}")
        _write(path, left)


def _write(path: Path, entries: Sequence[KeyEntry]) -> None:
    """Put these in the place of the old version, all at once, with its owner and mode."""
    text = _HEADER + yaml.safe_dump([entry.model_dump() for entry in entries], sort_keys=False)
    path = path.resolve()
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            with contextlib.suppress(FileNotFoundError):
                old = path.stat()
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Two commands at once must not undo each other's change. Raises KeysError if one is at it."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise KeysError(f"{path}: another command is changing it") from None
    finally:
        os.close(folder)
