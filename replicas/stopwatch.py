"""Where a step's time goes: wall time on the CPU, stream events on a GPU (no extra sync)."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up seconds per section. On a GPU read `seconds` only after a synchronisation."""

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

    def seconds(self, name: str) -> float:
        on_device_ms = sum(begin.elapsed_time(end) for begin, end in self._events[name])
        return self._wall[name] + float(on_device_ms) / 1000.0
