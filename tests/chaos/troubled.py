"""A fake replica that suffers what the first token of a prompt asks for.

Its tokens are those of `tests.cluster.fakes`, so the answer of an undisturbed run can be computed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from replicas.config import ReplicaConfig
from scheduler.messages import Batch, BatchKind, StepResult
from tests.cluster.fakes import VOCAB, FakeReplica

KILL_IN_PREFILL, HANG_ONCE, POISON = range(VOCAB - 3, VOCAB)
"""First tokens of prompts that ask for trouble: the first replica that fills such a row is killed,
the first one that steps it hangs, or all that step it are killed."""


class TroubledReplica(FakeReplica):
    """Strikes itself in the middle of a batch, and keeps count of it in a directory."""

    def __init__(self, directory: Path, step_s: float, kv_blocks: int) -> None:
        super().__init__(step_s, kv_blocks, prefill_s=step_s)
        self._directory = directory

    def step(self, batch: Batch, interrupted: Callable[[], bool] = lambda: False) -> StepResult:
        firsts = {row.tokens[0] for row in batch.prefill if row.tokens}
        held = [row for row in (*batch.prefill, *batch.rows) if row.sequence_id in self._residents]
        firsts |= {self._residents[row.sequence_id].content[0] for row in held}
        if batch.kind is BatchKind.PREFILL:
            fate = {KILL_IN_PREFILL: 1}
        else:
            fate = {HANG_ONCE: 1, POISON: 100}
        for trouble, times in fate.items():
            if trouble in firsts and self._strikes(trouble, times):
                if trouble == HANG_ONCE:
                    time.sleep(3600)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(batch, interrupted)

    def _strikes(self, trouble: int, times: int) -> bool:
        """So many times in all, in whichever processes; writes down this one's id."""
        for number in range(times):
            try:
                with (self._directory / f"{trouble}-{number}").open("x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                continue
            return True
        return False


def struck(directory: Path, trouble: int) -> list[int]:
    """The ids of the processes that have come to it."""
    return [int(path.read_text()) for path in directory.glob(f"{trouble}-*")]


def _load(config: ReplicaConfig, directory: Path, step_s: float) -> TroubledReplica:
    return TroubledReplica(directory, step_s, config.num_gpu_blocks_override or 2000)


def troubled_loader(directory: Path, step_s: float) -> Callable[[ReplicaConfig], TroubledReplica]:
    """A picklable factory of fakes that share a directory."""
    return partial(_load, directory=directory, step_s=step_s)
