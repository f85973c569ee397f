"""Where reports are written: a file that fails costs no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.bench.report_json import Report

Output = tuple[Path, Callable[[Report], str]]
"""A file, and what is to be in it."""


def write_each(report: Report, outputs: Sequence[Output]) -> list[str]:
    """Writes all that can be written; says what is wrong with the others."""
    wrong = []
    for path, text in outputs:
        try:
            path.write_text(text(report), encoding="utf-8")
        except (OSError, ValueError) as error:
            wrong.append(f"{path} was not written: {error}")
    return wrong
