"""A replica without a model whose steps take a given time: it measures the cluster, not the CPU.

It wraps the simulator's replica, which asserts what a real one would, into what a replica process
hosts. Its tokens are those of `scheduler.fake_replica.perfect_world`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random

from replicas.config import ReplicaConfig
from scheduler.fake_replica import FakeReplica
from scheduler.messages import Batch, BatchKind, Release, ReplicaSpec, StepResult


@dataclass(frozen=True)
class Speed:
    """What a synthetic replica takes; seconds."""

    step_s: float
    """One step, whatever the number of its rows."""
    prefill_s: float
    """One prefill batch, whatever its tokens."""
    start_s: float
    """Loading the models."""
    acceptance: float
    """Probability that a draft token is accepted, if those before it are."""
    prefill_token_s: float = 0.0
    """Each token of a prefill batch, on top."""

    def step_time(self, batch: Batch) -> float:
        """Seconds of one step of a batch, or of a prefill batch."""
        if batch.kind is BatchKind.SPECULATE:
            return self.step_s
        tokens = sum(len(row.tokens) for row in batch.prefill)
        return self.prefill_s + self.prefill_token_s * tokens

    def tokens_per_s(self, rows: int, draft_len: int) -> float:
        """What full groups of so many rows commit, without prefills."""
        per_step = sum(self.acceptance**position for position in range(draft_len + 1))
        return rows * per_step / self.step_s


class SyntheticReplica:
    """Implements HostedReplica."""

    def __init__(self, spec: ReplicaSpec, speed: Speed) -> None:
        self.spec = spec
        self.broken: Exception | None = None
        self._speed = speed
        self._rng = Random(0)
        self._fake = FakeReplica("", spec, speed.acceptance, self._rng)
        self._ids: set[str] = set()

    @property
    def residents(self) -> tuple[str, ...]:
        return tuple(self._ids)

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Sequences that are not resident are passed over."""
        gone = tuple(each for each in sequence_ids if each in self._ids)
        self._fake.release(Release(self._fake.id, gone))
        self._ids.difference_update(gone)

    def step(self, batch: Batch, interrupted: Callable[[], bool]) -> StepResult:
        """Sleeps through the batch's steps. Raises AssertionError for a batch that is wrong."""
        if batch.replica_id != self._fake.id:
            # A new membership; the residents of the old one were released before.
            assert not self._ids, "residents of an earlier membership"
            self._fake = FakeReplica(batch.replica_id, self.spec, self._speed.acceptance, self._rng)
        end_s = time.perf_counter()
        each_s = self._speed.step_time(batch)
        self._fake.receive(batch)
        run = self._fake.begin(batch)
        self._ids.update(row.sequence_id for row in batch.prefill)
        more = True
        while more:
            # What the fake itself takes is part of the step.
            end_s += each_s
            more = run.advance()
            time.sleep(max(0.0, end_s - time.perf_counter()))
            more = more and not interrupted()
        self._fake.end(batch)
        return run.result(each_s)


def synthetic_loader(
    spec: ReplicaSpec, speed: Speed
) -> Callable[[ReplicaConfig], SyntheticReplica]:
    """A factory that can be sent to the replicas' processes."""
    return partial(_load, spec=spec, speed=speed)


def _load(_config: ReplicaConfig, spec: ReplicaSpec, speed: Speed) -> SyntheticReplica:
    time.sleep(speed.start_s)
    return SyntheticReplica(spec, speed)
