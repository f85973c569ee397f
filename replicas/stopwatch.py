"""Where a step's time goes: wall time on the CPU, stream events on a GPU (no extra sync)."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import AbstractContextManager

import torch


class Stopwatch:
    """Adds up seconds per section. On a GPU read `seconds` only after a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._wall: dict[str, float] = defaultdict(float)
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)

    def section(self, name: str) -> AbstractContextManager[None]:
        """Times blocks under `name`, one after the other; one that raises does not count."""
        if self._cuda:
            return _OnDevice(self._events[name])
        return _OnWall(self._wall, name)

    def seconds(self, name: str) -> float:
        """Seconds spent in the section so far."""
        on_device_ms = sum(begin.elapsed_time(end) for begin, end in self._events[name])
        return self._wall[name] + float(on_device_ms) / 1000.0


class _OnWall:
    """A step has a dozen of these: half the time of a generator's context manager."""

    __slots__ = ("_begun", "_name", "_wall")

    def __init__(self, wall: dict[str, float], name: str) -> None:
        self._wall = wall
        self._name = name

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._wall[self._name] += time.perf_counter() - self._begun


class _OnDevice:
    def __init__(self, events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        self._events = events

    def __enter__(self) -> None:
        self._begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._begun.record()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end.record()
            self._events.append((self._begun, end))
