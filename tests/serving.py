"""The real command `lockstep serve` in a process of its own, with a Ray of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

START_S = 240.0
STOP_S = 60.0
_ROOT = Path(__file__).parents[1]


@contextmanager
def lockstep_serve(
    arguments: Sequence[str],
    log: Path,
    ray_address: str = "local",
    command: Sequence[str] = ("-m", "cluster.cli.main"),
    cwd: Path = _ROOT,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[subprocess.Popen[bytes]]:
    """Ready to serve; stopped at the end, if it is still there. What it prints is in `log`."""
    environment = os.environ | {"RAY_ADDRESS": ray_address, "OMP_NUM_THREADS": "1"} | variables
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *command, "serve", *arguments],
            stdout=out,
            stderr=out,
            env=environment,
            cwd=cwd,
            # A group of its own, as a shell gives to what it runs: Ctrl-C is sent to all of it.
            start_new_session=True,
        )
    try:
        deadline_s = time.monotonic() + START_S
        while "Ctrl-C stops it" not in " ".join(log.read_text(errors="replace").split()):
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline_s, log.read_text(errors="replace")
            time.sleep(0.1)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
