"""What commands print with: consoles, bars, and how far the replicas of a cluster are."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Table

from cluster.worker.loading import LOGGER, UP

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
    """A context with a bar for each phase, where stderr is a terminal.

    Entered again, new ones begin below what was printed.
    """

    def __enter__(self) -> Bars:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._tasks: dict[str, int] = {}
        self._progress.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._progress.stop()

    def note(self, phase: str, done: int, total: int | None) -> None:
        """So much of the phase is done."""
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=total)
        self._progress.update(self._tasks[phase], completed=done)  # type: ignore[arg-type]


class Terminal:
    """Says how far a cluster is; the lines of Ray's processes come to `take`, unless `verbose`."""

    def __init__(self, verbose: bool, stderr: bool = True) -> None:
        self.console = console(stderr)
        self.tell = None if verbose else self.take
        """For `ClusterRun.deploy`."""
        self._stages: dict[tuple[str, int], str] = {}
        """How far each replica is, by its process: address and number."""
        self._moving = self.console.is_terminal and not verbose

    def say(self, text: str) -> None:
        self.console.print(text)

    def take(self, logged: Mapping[str, Any]) -> None:
        """What a process has logged, as Ray brings it to this process; comes on a thread of Ray's.

        Elsewhere than on a terminal each change is a line.
        """
        process = (logged["ip"], logged["pid"])
        for line in logged["lines"]:
            _, _, stage = line.partition(f" {LOGGER} ")
            if stage and self._stages.get(process) != stage:
                self._stages[process] = stage
                if not self._moving or stage.endswith(UP):
                    self.say(f"{self._name(process)} {stage}")

    def _name(self, process: tuple[str, int]) -> str:
        number, (address, pid) = list(self._stages).index(process) + 1, process
        several = len({address for address, _ in self._stages}) > 1
        return f"replica {number} (pid {pid}{f', ip {address}' * several})"

    @contextmanager
    def progress(self, what: str) -> Iterator[None]:
        """Shows what is waited for and how far each replica is."""
        begun_s = time.monotonic()
        spinner = Spinner("dots")

        def shown() -> Table:
            table = Table.grid(padding=(0, 1))
            table.add_row(spinner, f"{what} ({time.monotonic() - begun_s:.0f} s)")
            for process, stage in list(self._stages.items()):
                table.add_row("", f"{self._name(process)} {stage}")
            return table

        if not self._moving:
            self.say(f"{what} ...")
            yield
            return
        with Live(console=self.console, transient=True, get_renderable=shown):
            yield
