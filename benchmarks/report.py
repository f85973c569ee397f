"""What every benchmark prints and writes: the machine, a table, a JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """The machine and the versions that decide speed."""
    import torch

    described: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    for package in ("torch", "transformers", "ray", "lockstep"):
        try:
            described[package] = version(package)
        except PackageNotFoundError:
            continue
    return described


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; floats to three digits."""
    cells = [[_cell(value) for value in row] for row in rows]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 100
        else (f"{value:.0f}" if isinstance(value, float) else str(value))
    )


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures, with the machine, if a path is given."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **figures}, indent=2) + "\n")
