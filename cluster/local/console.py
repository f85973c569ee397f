"""What work in one process prints with: consoles, and bars of how far it is."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def console(stderr: bool = False) -> Console:
    """Lines break between words on a terminal and not at all elsewhere.

    Names and errors of others are printed, so brackets and colons are no markup.
    """
    file = sys.stderr if stderr else sys.stdout
    wraps = file.isatty()
    return Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=not wraps)


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
