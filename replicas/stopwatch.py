"""Where a step's time goes: wall time on the CPU, stream events on a GPU (no extra sync)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up seconds per section."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._wall: dict[str, float] = defaultdict(float)
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Times blocks under `name`, one after the other; one that raises does not count."""
        if self._cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events[name].append((begin, end))
        else:
            begun_s = time.perf_counter()
            yield
            self._wall[name] += time.perf_counter() - begun_s

    def add(self, name: str, seconds: float) -> None:
        """What was timed elsewhere."""
        self._wall[name] += seconds

    def seconds(self, name: str) -> float:
        """Waits for what a GPU has not done yet: an event that lies ahead has no time."""
        on_device_ms = 0.0
        for begin, end in self._events[name]:
            end.synchronize()
            on_device_ms += begin.elapsed_time(end)
        return self._wall[name] + on_device_ms / 1000.0
