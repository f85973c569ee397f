"""The machine and the versions that decide speed."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """What stands beside every figure."""
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
