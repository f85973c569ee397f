"""What this process has open, for tests that nothing is left open."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter


def open_files() -> Counter[str]:
    """By name, of sockets and pipes their own, and how many there are of each.

    What earlier tests left for the collector goes now, and not in the middle of a test.
    """
    gc.collect()
    return _open()


def assert_closed_but(before: Counter[str], bound_s: float = 10.0) -> None:
    """Nothing is open that was not before; a thread of torch's may take a moment to close."""
    deadline_s = time.monotonic() + bound_s
    while left := _open() - before:
        assert time.monotonic() < deadline_s, f"still open: {left}"
        time.sleep(0.01)


def _open() -> Counter[str]:
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own is closed by now
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
    return found
