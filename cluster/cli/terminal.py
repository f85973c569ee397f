"""What commands print with: consoles, bars, and for those that start Ray a terminal of their own.

There only our own lines and how far replicas are is shown. Everything else that this process and
Ray's would print goes to a file, through the process's own descriptors: Ray writes from several
threads and from C++, and its loggers alone would not do.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.spinner import Spinner
from rich.table import Table

from cluster.worker.loading import LOGGER, UP

if TYPE_CHECKING:
    import grpc

    from cluster.client.channel import Server

_STAGE = re.compile(rf"\(ServeReplica:\S+ (pid=\d+[^)]*)\).*? {re.escape(LOGGER)} (.+)")


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


class Stages:
    """How far each replica is, by what its process logs, which Ray brings here line by line."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        """By a replica's process."""

    def read(self, lines: str) -> list[str]:
        """Takes notice of these lines; what has changed, a sentence for each."""
        said = []
        for process, stage in _STAGE.findall(re.sub(r"\x1b\[\d*m", "", lines)):
            if self.of.get(process) != stage:
                self.of[process] = stage
                said.append(f"{self._name(process)} {stage}")
        return said

    def lines(self) -> list[tuple[str, str]]:
        return [(self._name(process), stage) for process, stage in self.of.items()]

    def _name(self, process: str) -> str:
        return f"replica {list(self.of).index(process) + 1} ({process.replace('=', ' ')})"


class Terminal:
    """A context in which only its console writes to the terminal, unless `verbose`.

    `shown`: 2 if its lines go to stderr, 1 for stdout.
    """

    def __init__(self, verbose: bool, shown: int = 2) -> None:
        self._verbose = verbose
        self._shown = shown
        self.log: Path | None = None
        """Where all other lines go."""
        self._saved: list[int] = []
        self._read = 0

    def __enter__(self) -> Terminal:
        sys.stdout.flush()
        sys.stderr.flush()
        # Read when Ray is imported: else it holds back what a second replica says like the first.
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        shown = {1: sys.stdout, 2: sys.stderr}[self._shown]
        if not self._verbose:
            shown = os.fdopen(os.dup(self._shown), "w", buffering=1, encoding="utf-8")
            number, name = tempfile.mkstemp(prefix="lockstep-", suffix=".log")
            self.log = Path(name)
            self._saved = [os.dup(1), os.dup(2)]
            os.dup2(number, 1)
            os.dup2(number, 2)
            os.close(number)
        self.console = console(file=shown)
        if self.log is not None:
            self.say(f"Lines of Ray and Serve go to {self.log}; --verbose shows them here.")
        return self

    def __exit__(self, *_exc: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, saved in enumerate(self._saved, 1):
            os.dup2(saved, number)
            os.close(saved)
        if self._saved:
            self.console.file.close()
        self._saved = []

    def say(self, text: str) -> None:
        self.console.print(text)

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[], None]]:
        """Shows what is waited for and how far each replica is; a call takes a look at the log.

        Elsewhere than on a terminal each change is a line.
        """
        stages, begun_s = Stages(), time.monotonic()
        moving = self.console.is_terminal and not self._verbose

        def shown() -> Table:
            table = Table.grid(padding=(0, 1))
            seconds = f"{time.monotonic() - begun_s:.0f} s"
            table.add_row(spinner, f"{what} ({seconds})")
            for name, stage in stages.lines():
                table.add_row("", f"{name} {stage}")
            return table

        def look() -> None:
            for said in stages.read(self._new_lines()):
                if not moving or said.endswith(UP):
                    self.say(said)

        if moving:
            spinner = Spinner("dots")
            with Live(
                console=self.console, transient=True, get_renderable=shown, redirect_stdout=False,
                redirect_stderr=False,
            ):  # fmt: skip
                yield look
        else:
            self.say(f"{what} ...")
            yield look

    def _new_lines(self) -> str:
        """Whole lines that were logged since the last look."""
        if self.log is None:
            return ""
        with self.log.open("rb") as log:
            log.seek(self._read)
            new = log.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace")
