"""Where settings come from: arguments, YAML files, the environment, under which names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.config import SECTIONS, ClusterConfig, ConfigError, ServerConfig

ALIASES: Mapping[str, str] = {
    "replica.context_len": "max_model_len",
    "replica.tensor_parallel": "tensor_parallel_size",
    "scheduler.rows_max": "max_num_seqs",
    "server.http_host": "host",
    "server.http_port": "port",
}
"""Other servers' names for the same settings."""
_TEXT_BYTES_MAX = 1 << 20
_YAML_VALUES_MAX = 100_000
"""PyYAML takes a kilobyte for one, of which a character may be all that stands in the text."""


def from_args(args: Mapping[str, Any]) -> ClusterConfig:
    """Settings from a mapping of sections; a key may also be a section and a field, with a dot.

    Values may be strings, as `serve run cluster.app:build replica.target=... replicas=2` gives
    them; "null" stands for no value, as `is_null` says. Raises `ConfigError`.
    """
    nested: dict[str, Any] = {}
    for key, value in args.items():
        if key.partition(".")[0] not in SECTIONS:
            nested[key] = _scalar(key, value)
        elif "." not in key:
            nested[key] = dict(value) if isinstance(value, Mapping) else _scalar(key, value)
    for key, value in args.items():
        section, dot, name = key.partition(".")
        if not dot or section not in SECTIONS:
            continue
        inner = nested[section] = {} if nested.get(section) is None else nested[section]
        if not isinstance(inner, dict) or name in inner:
            raise ConfigError(f"{key}: given twice")
        inner[name] = _scalar(name, value)
    try:
        return ClusterConfig.model_validate(nested)
    except ValidationError as error:
        raise ConfigError.of(error) from None


def is_null(name: str, text: str) -> bool:
    """Whether a setting's text stands for no value. `speculative_config: none` names a method."""
    return text.lower() == "null" or (text.lower() == "none" and name != "speculative_config")


def _scalar(name: str, value: Any) -> Any:
    return None if isinstance(value, str) and is_null(name, value) else value


def overridden(config: ClusterConfig, given: Mapping[str, Any]) -> ClusterConfig:
    """The same settings, but for those in `given`, by their sections. Raises `ConfigError`."""
    # What was not said follows what is said now: another target has another drafter.
    nested = config.model_dump(exclude_unset=True)
    for key, value in given.items():
        merges = key in SECTIONS and isinstance(value, Mapping)
        nested[key] = nested.get(key, {}) | value if merges else value
    return from_args(nested)


def from_file(path: Path) -> ClusterConfig:
    """Settings from a YAML file: either those of `from_args`, or a Serve config file.

    Raises `ConfigError`, and `OSError` for a file that cannot be read.
    """
    text = text_of(path)
    try:
        data = yaml_of(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if data is None:
        return ClusterConfig()
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of settings")
    return from_args(_serve_file_args(data) if "applications" in data else data)


def yaml_of(text: str) -> Any:
    """What the YAML says, in Python's own types.

    Raises `ConfigError` with the line and no word of the text: a key may stand there.
    """
    try:
        return yaml.load(text, _Bounded)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(f"line {line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
        # PyYAML raises whatever Python does with a value that its tag or form does not fit.
        raise ConfigError("not YAML") from None


class _Bounded(yaml.SafeLoader):
    """Each line of aliases may double what is read: 30 lines are enough for gigabytes.

    Raises `ConfigError`.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._values += 1
        refused = None
        if self.check_event(yaml.AliasEvent):
            refused = "aliases (*name) are not read"
        elif self._values > _YAML_VALUES_MAX:
            refused = f"more than {_YAML_VALUES_MAX} values"
        if refused:
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise ConfigError(f"line {line}: {refused}")
        return super().compose_node(parent, index)


def text_of(path: Path) -> str:
    """Raises `ConfigError` for what is not UTF-8 or too long, and `OSError`."""
    with path.open("rb") as file:
        data = file.read(_TEXT_BYTES_MAX + 1)
    if len(data) > _TEXT_BYTES_MAX:
        raise ConfigError(f"{path}: more than {_TEXT_BYTES_MAX >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8") from None


def server_address(environment: Mapping[str, str] = os.environ) -> str:
    """Where clients look for the server: LOCKSTEP_ADDRESS, else this machine's default port."""
    return environment.get("LOCKSTEP_ADDRESS", f"localhost:{ServerConfig().grpc_port}")


def api_key(path: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """A client's key: from a file, else LOCKSTEP_API_KEY; None if neither is given.

    Never an option of its own: what stands on a command line, everybody on the machine can read.
    Raises `ConfigError` for an empty file or a key that no header can carry, and `OSError`.
    """
    if path is None:
        key = environment.get("LOCKSTEP_API_KEY", "").strip()
        return checked_key(key, "LOCKSTEP_API_KEY") if key else None
    return checked_key(text_of(path).strip(), str(path))


def checked_key(key: str, source: str) -> str:
    """Raises `ConfigError`, which names the source, for a key that no header can carry."""
    if not key:
        raise ConfigError(f"{source}: contains no API key")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{source}: an API key must be printable ASCII without spaces")
    return key


def _serve_file_args(data: dict[str, Any]) -> dict[str, Any]:
    """Raises `ConfigError`."""
    applications = data["applications"] or [{}]
    if not isinstance(applications, list):
        raise ConfigError("applications: must be a list")
    args = _mapping(_mapping(applications[0], "applications.0").get("args"), "applications.0.args")
    grpc, http = (_mapping(data.get(name), name) for name in ("grpc_options", "http_options"))
    ports = {
        "grpc_port": grpc.get("port"),
        "http_host": http.get("host"),
        "http_port": http.get("port"),
    }
    section = _mapping(args.get("server"), "server")
    for name, value in ports.items():
        if value is not None and name not in section:
            args.setdefault(f"server.{name}", value)
    return args


def _mapping(found: Any, name: str) -> dict[str, Any]:
    """A copy; empty for nothing. Raises `ConfigError`, which names it so."""
    if not isinstance(found or {}, Mapping):
        raise ConfigError(f"{name}: must be a mapping")
    return dict(found or {})
