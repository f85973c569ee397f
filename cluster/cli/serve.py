"""What `lockstep serve` does: start, say how far it is and where it listens, stop on a signal."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cluster.client import Client
from cluster.config import ClusterConfig, ConfigError, LogFormat
from cluster.config_sources import api_key, checked_key, overridden
from cluster.frontend.admission.keys import hash_of
from cluster.local.console import console
from cluster.metrics.log import said_by
from cluster.worker.loading import LOGGER
from replicas.errors import PairRefused
from replicas.names import DEMO, SMOLLM2, TINY, with_revision

if TYPE_CHECKING:
    from cluster.run import ClusterRun


def at_revision(config: ClusterConfig, revision: str) -> ClusterConfig:
    """The settings with a revision of the target, which keeps its name for clients.

    Raises ConfigError for a target that has none.
    """
    try:
        target = with_revision(config.replica.target, revision)
    except PairRefused as error:
        raise ConfigError(f"--{error}") from None
    return _renamed(config, {"target": target})


def with_paths(config: ClusterConfig) -> ClusterConfig:
    """The settings with absolute paths for models that are here, the target keeping its name for
    clients: a Ray that was begun elsewhere has another working directory."""
    given: dict[str, Any] = {}
    if target := _path_of(config.replica.target):
        given["target"] = target
    drafting = config.replica.drafting
    if drafting.model is not None and (model := _path_of(drafting.model)):
        given["speculative_config"] = drafting.model_dump(exclude_unset=True) | {"model": model}
    return _renamed(config, given) if given else config


def _path_of(model: str) -> str | None:
    """Absolute; None where the name stands for no file or directory here."""
    path = Path(model)
    return str(path.resolve()) if model not in (DEMO, SMOLLM2, TINY) and path.exists() else None


def _renamed(config: ClusterConfig, replica: dict[str, Any]) -> ClusterConfig:
    name = {"served_model_name": config.model_name}
    return overridden(config, {"replica": replica, "server": name})


def with_key(config: ClusterConfig, given: str | None) -> ClusterConfig:
    """The settings with the hash of the one key, `given` or from LOCKSTEP_API_KEY.

    Takes the key out of the environment, which Ray's processes get. Raises ConfigError.
    """
    key = None if given is None else checked_key(given, "--api-key")
    if key is None and not (config.auth.has_keys or config.auth.allow_anyone):
        key = api_key(None)
    os.environ.pop("LOCKSTEP_API_KEY", None)
    if key is None:
        return config
    return overridden(config, {"auth": {"api_key_sha256": hash_of(key)}})


def hide_key() -> None:
    """Take the key of --api-key out of this process's command line, which Ray keeps as that of its
    job, and which others on the machine can read."""
    shown = list(sys.orig_argv)
    for at, word in enumerate(sys.orig_argv):
        if word == "--api-key":
            shown[at + 1 : at + 2] = ["***"]
        elif word.startswith("--api-key="):
            shown[at] = "--api-key=***"
    if shown != sys.orig_argv:
        import ray

        ray._raylet.setproctitle(" ".join(shown))


def serve_until_signal(config: ClusterConfig, verbose: bool = False, replace: bool = False) -> int:
    """Start the cluster and keep it up until SIGINT or SIGTERM. Returns the exit status.

    0 when the running requests could finish or the grace time had passed; 1 when a second signal
    ended them at once, or when the cluster did not start within `actors.start_s`.
    """
    terminal = Terminal(verbose, log_format=config.server.log_format)
    from cluster import run

    hide_key()
    told = threading.Event()

    def tell(_signal: int, _frame: FrameType | None) -> None:
        if told.is_set():
            raise KeyboardInterrupt
        told.set()

    cluster = run.ClusterRun(config)
    try:
        terminal.say_start()
        cluster.deploy(tell=terminal.tell, join_ray=True, replace=replace)
        # Ray sets handlers of its own while it starts.
        signal.signal(signal.SIGINT, tell)
        signal.signal(signal.SIGTERM, tell)
        least, most = config.replicas_min, config.replicas_max
        wanted = str(most) if config.autoscaling is None else f"{least} to {most}"
        terminal.say(f"Replicas of {config.replica.target} start: {wanted} ...")
        if late := _wait_until_ready(cluster, config, told):
            terminal.say(f"The update is not complete: {late}")
        if not told.is_set():
            # The first has told the pool before Serve knows of it.
            up = max(cluster.replicas_up, min(1, least))
            terminal.say(
                f"Lockstep serves {config.replica.target} on {up} of {wanted} replica(s): "
                f"gRPC on port {config.server.grpc_port}, "
                f"HTTP on {config.server.http_host}:{config.server.http_port}, "
                f"dashboard at http://localhost:{config.server.http_port}/dashboard. "
                "Ctrl-C stops it."
            )
        told.wait()
        terminal.say("Stopping: running requests may finish. A second Ctrl-C ends them.")
        cluster.stop()
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        terminal.say("Stopping at once.")
        cluster.stop(at_once=True)
        return 1 if told.is_set() else 0
    except run.StartFailed as error:
        what = "The update failed, and what there is stays"
        if not cluster.updates:
            what = "Lockstep did not start"
            cluster.stop(at_once=True)  # nothing runs that could finish
        terminal.say(f"{what}: {error}")
        return 1
    except BaseException:
        cluster.stop()
        raise
    terminal.say("Stopped.")
    return 0


def _wait_until_ready(
    cluster: ClusterRun, config: ClusterConfig, told: threading.Event
) -> str | None:
    """Until the first replica is ready; if none is to be there, until the frontend is up.

    Returns early when told to stop. Raises StartFailed, also after `actors.start_s`; but returns
    what it says where an application is updated and there is one that serves, old or new.
    """
    from cluster.run import StartFailed

    with Client(f"localhost:{config.server.grpc_port}") as client:

        def done(all_up: bool) -> bool:
            if told.is_set():
                return True
            # A replica of the application that is updated would answer for those to come.
            needs_all = cluster.updates or not config.replicas_min
            return (all_up or not needs_all) and (not config.replicas_min or client.ready())

        try:
            cluster.wait_until(done, told.wait)
        except StartFailed as error:
            if not (cluster.updates and client.ready()):
                raise
            return str(error)
    return None


class Terminal:
    """Says how far a cluster is: a line for each change.

    The lines of Ray's processes come to `take`, unless `verbose`.
    """

    def __init__(self, verbose: bool, stderr: bool = True, log_format: LogFormat = "text") -> None:
        self.console = console(stderr)
        self._json = log_format == "json"
        if verbose:
            # Ray reads it when it is imported; else it holds back what a second replica says alike.
            os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        self.tell = None if verbose else self.take
        """For `ClusterRun.deploy`."""
        self._stages: dict[tuple[str, int], str] = {}
        """How far each replica is, by its process: address and number."""

    def say(self, text: str) -> None:
        if self._json:
            self.console.print(json.dumps({"message": text}), soft_wrap=True)
        else:
            self.console.print(text)

    def say_start(self) -> None:
        self.say("Ray and Serve start ...")
        if self.tell is not None:
            self.say(
                "Their logs are on each node, in session_latest/logs of Ray's temporary directory"
                f" (/tmp/lockstep-{os.geteuid()}/ray; /tmp/ray where Ray ran before); --verbose"
                " shows them here."
            )

    def take(self, logged: Mapping[str, Any]) -> None:
        """What a process has logged, as Ray brings it to this process; comes on a thread of Ray's.

        Of that, how far a replica is.
        """
        process = (logged["ip"], logged["pid"])
        for line in logged["lines"]:
            stage = said_by(LOGGER, line)
            if stage and self._stages.get(process) != stage:
                self._stages[process] = stage
                number = list(self._stages).index(process) + 1
                self.say(f"replica {number} (pid {process[1]}, ip {process[0]}) {stage}")
