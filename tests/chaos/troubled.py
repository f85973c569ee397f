"""A fake replica that can be told what to suffer, by the first token of a prompt.

Its tokens are those of `tests.cluster.fakes`, so a perfect world can be computed. It writes down
what it does now, so that a test can strike at the right moment.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.shared.processes import lives
from replicas.config import ReplicaConfig
from scheduler.messages import Batch, BatchKind, StepResult
from tests.cluster.fakes import VOCAB, FakeReplica

SLOW_PREFILL, SLOW_STEP, HANG_ONCE, POISON = range(VOCAB - 4, VOCAB)
"""First tokens of prompts that ask for trouble. HANG_ONCE hangs the first replica that steps it."""


@dataclass(frozen=True)
class Doing:
    """What a fake does now."""

    pid: int
    what: str
    """"prefill", "speculate" or "idle"."""
    firsts: tuple[int, ...] = ()
    """First tokens of the prompts of the batch's rows."""
    serial: int = 0
    """Batches begun by this process."""


class Stage:
    """A directory through which a test and its fakes talk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def doing(self) -> list[Doing]:
        """What each living fake does now."""
        found = []
        for path in self.directory.glob("doing-*"):
            pid = int(path.name.removeprefix("doing-"))
            if lives(pid):
                what, firsts, serial = json.loads(path.read_text())
                found.append(Doing(pid, what, tuple(firsts), serial))
        return found

    def wait_for(self, what: str, first: int, other_than: int = 0, bound_s: float = 120.0) -> Doing:
        """Until a fake, another than the process given, does `what` to such a row."""
        deadline_s = time.monotonic() + bound_s
        while True:
            for doing in self.doing():
                if doing.what == what and first in doing.firsts and doing.pid != other_than:
                    return doing
            assert time.monotonic() < deadline_s, f"no {what} of {first}: {self.doing()}"
            time.sleep(0.002)

    def is_first(self, name: str) -> bool:
        """True for the first call, in whichever process."""
        try:
            os.close(os.open(self.directory / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def count(self, name: str) -> int:
        """How often `note` was called with this name."""
        return len(list(self.directory.glob(f"{name}-*")))

    def note(self, name: str) -> None:
        (self.directory / f"{name}-{os.getpid()}-{time.monotonic_ns()}").touch()

    def write_doing(self, what: str, firsts: list[int], serial: int) -> None:
        self._write(f"doing-{os.getpid()}", json.dumps([what, firsts, serial]))

    def _write(self, name: str, text: str) -> None:
        # Readers see the old text or the new one, never half of it.
        fresh = self.directory / f".{name}-{os.getpid()}"
        fresh.write_text(text)
        fresh.rename(self.directory / name)


class TroubledReplica(FakeReplica):
    """`slow_s`: how long a SLOW_PREFILL prefill or a step with a SLOW_STEP row takes."""

    def __init__(self, stage: Stage, step_s: float, slow_s: float, kv_blocks: int) -> None:
        super().__init__(step_s, kv_blocks)
        self._stage = stage
        self._plain_s = step_s
        self._slow_s = slow_s
        self._serial = 0

    def step(self, batch: Batch, interrupted: Callable[[], bool] = lambda: False) -> StepResult:
        firsts = [row.tokens[0] for row in batch.prefill if row.tokens]
        held = [row for row in (*batch.prefill, *batch.rows) if row.sequence_id in self._residents]
        firsts += [self._residents[row.sequence_id].content[0] for row in held]
        self._serial += 1
        self._stage.write_doing(batch.kind.value, firsts, self._serial)
        try:
            self._suffer(batch, firsts)
            return super().step(batch, interrupted)
        finally:
            self._stage.write_doing("idle", [], self._serial)

    def _suffer(self, batch: Batch, firsts: list[int]) -> None:
        self._prefill_s = self._slow_s if SLOW_PREFILL in firsts else 0.0
        self._step_s = self._slow_s if SLOW_STEP in firsts else self._plain_s
        if batch.kind is BatchKind.PREFILL:
            return
        if POISON in firsts:
            self._stage.note("killed")
            os._exit(1)
        if HANG_ONCE in firsts and self._stage.is_first("hung"):
            time.sleep(3600)


def _load(config: ReplicaConfig, directory: Path, step_s: float, slow_s: float) -> TroubledReplica:
    return TroubledReplica(Stage(directory), step_s, slow_s, config.kv_blocks or 2000)


def troubled_loader(
    directory: Path, step_s: float = 0.005, slow_s: float = 0.5
) -> Callable[[ReplicaConfig], TroubledReplica]:
    """A picklable factory of fakes that talk through a directory."""
    return partial(_load, directory=directory, step_s=step_s, slow_s=slow_s)
