"""Whether a file can be written, asked before the work whose result it is to hold."""

from __future__ import annotations

from pathlib import Path


def check_writable(path: Path) -> None:
    """Raises OSError if it cannot be; makes missing folders, changes no file and leaves none."""
    if path.exists():
        if path.is_file() or path.is_dir():  # the reader of a pipe would take this for its end
            path.open("ab").close()
        return
    # Where a link points to nothing, that is tried, and the link stays.
    new = path.resolve()
    new.parent.mkdir(parents=True, exist_ok=True)
    new.open("ab").close()
    new.unlink()
