"""What commands print with: consoles, bars, and how far the replicas of a cluster are."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.config import LogFormat
from cluster.metrics.log import said_by
from cluster.worker.loading import LOGGER

if TYPE_CHECKING:
    import grpc

    from cluster.client.channel import Server


def console(stderr: bool = False) -> Console:
    """Lines break between words on a terminal and not at all elsewhere.

    Names and errors of others are printed, so brackets and colons are no markup.
    """
    file = sys.stderr if stderr else sys.stdout
    wraps = file.isatty()
    return Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=not wraps)


def failure(server: Server, error: grpc.RpcError) -> str:
    """Why a call to the server failed."""
    if error.code().name == "UNAVAILABLE" and "connect" in (error.details() or ""):
        return f"No server answers at {server.address}; `lockstep serve` starts one."
    return f"{server.address}: {error.code().name}: {error.details()}"


class Bars:
    """A context with a bar for each phase, on a terminal and in a notebook.

    Entered again, new ones begin below what was printed.
    """

    def __init__(self, shown: bool = True) -> None:
        self._shown = shown

    def __enter__(self) -> Bars:
        to = console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=to,
            disable=not (self._shown and (sys.stderr.isatty() or to.is_jupyter)),
        )
        self._tasks: dict[str, int] = {}
        self._progress.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._progress.stop()

    def note(self, phase: str, done: int, total: int | None, said: str = "") -> None:
        """So much of the phase is done; `said` stands behind its name."""
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=total)
        shown = f"{phase}: {said}" if said else phase
        self._progress.update(
            self._tasks[phase],  # type: ignore[arg-type]
            description=shown,
            completed=done,
            total=total,
        )


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
