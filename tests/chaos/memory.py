"""Whether anything grows: the resident memory of a cluster's processes, and a line through it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression, pvariance
from typing import Any

from benchmarks.shared.processes import Process
from tests.chaos.hosted import HostedCluster

EVERY_S = 5.0


@dataclass(frozen=True)
class Fit:
    """A line through the memory of one process."""

    samples: int
    first_mib: float
    last_mib: float
    peak_mib: float
    mib_per_hour: float
    error_mib_per_hour: float
    """Standard error of the slope; memory grows in jumps, so it flatters."""


def fit(samples: Sequence[tuple[float, float]]) -> Fit:
    """Least squares over at least two (seconds, MiB)."""
    count = len(samples)
    times, values = zip(*samples, strict=True)
    slope, first = linear_regression(times, values)
    rest = sum((mib - first - slope * at_s) ** 2 for at_s, mib in samples)
    error = (rest / (count - 2) / count / pvariance(times)) ** 0.5 if count > 2 else 0.0
    return Fit(count, values[0], values[-1], max(values), slope * 3600, error * 3600)


class Memory:
    """Samples of every process of the cluster, taken on a thread."""

    def __init__(self, hosted: HostedCluster) -> None:
        self._hosted = hosted
        self._samples: dict[Process, list[tuple[float, float]]] = defaultdict(list)
        self._over = threading.Event()

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """Samples while the body runs."""
        thread = threading.Thread(target=self._sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(60.0)

    def _sample(self) -> None:
        start_s = time.monotonic()
        while not self._over.wait(EVERY_S):
            at_s = time.monotonic() - start_s
            for process in self._hosted.processes():
                if (mib := _resident_mib(process.pid)) is not None:
                    self._samples[process].append((at_s, mib))

    def figures(self, after_s: float) -> list[dict[str, Any]]:
        """Of each process with two samples at least since then."""
        late = {
            process: [sample for sample in samples if sample[0] >= after_s]
            for process, samples in self._samples.items()
        }
        return [
            {"kind": process.kind, "pid": process.pid} | asdict(fit(samples))
            for process, samples in late.items()
            if len(samples) > 1
        ]


def _resident_mib(pid: int) -> float | None:
    """Resident memory of a process in MiB; None when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
