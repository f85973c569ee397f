"""What every benchmark prints and writes: the machine, a table, a JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.bench.report import machine, number

__all__ = ["machine", "percentiles", "table", "write_json"]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; floats to three digits."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        cells = (number(value) if isinstance(value, float) else str(value) for value in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def percentiles(values: Iterable[float], at: Sequence[int]) -> dict[str, float]:
    """By name; none of no values."""
    found = list(values)
    return {f"p{n}": round(float(np.percentile(found, n)), 4) for n in at if found}


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures, with the machine, if a path is given; what JSON has not, as text."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=2, default=str) + "\n")
