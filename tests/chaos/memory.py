"""Whether anything grows: the resident memory of a cluster's processes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.shared.processes import Process
from tests.chaos.hosted import HostedCluster, HostError

EVERY_S = 5.0


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
            with contextlib.suppress(HostError):  # It may be busy, and the run goes on.
                for process in self._hosted.processes():
                    if (mib := _resident_mib(process.pid)) is not None:
                        self._samples[process].append((at_s, mib))

    def figures(self, after_s: float) -> list[dict[str, Any]]:
        """Of each process with two samples at least since then."""
        figures = []
        for process, samples in self._samples.items():
            late = [mib for at_s, mib in samples if at_s >= after_s]
            if len(late) > 1:
                mib = {"first_mib": late[0], "last_mib": late[-1], "peak_mib": max(late)}
                figures.append({"kind": process.kind, "pid": process.pid} | mib)
        return figures


def _resident_mib(pid: int) -> float | None:
    """Resident memory of a process in MiB; None when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
