"""What all commands print with: consoles, bars of progress, the sentence on a server that fails."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    import grpc

    from cluster.client.channel import Server


def console(stderr: bool = False, file: IO[str] | None = None) -> Console:
    """Lines break between words on a terminal and not at all elsewhere.

    Names and errors of others are printed, so brackets and colons are no markup.
    """
    file = file or (sys.stderr if stderr else sys.stdout)
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
