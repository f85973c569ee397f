"""How much memory a device has left for this process."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def free_bytes(device: torch.device, share: float = 1.0) -> int:
    """What the device has left for this process, whose share of a GPU it is.

    On a GPU that is what no process holds, memory that this one has freed and keeps included.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_allocated(device)
        cached = torch.cuda.memory_reserved(device) - held
        return max(min(int(free + cached), int(total * share) - int(held)), 0)
    return _free_cpu_bytes()


def _free_cpu_bytes() -> int:
    """What the machine or the container's memory group leaves, page cache counted as free."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return max(free, 0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().split("\n")
    except OSError:
        return []
