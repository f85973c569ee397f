"""A replica without a model whose steps take a given time: it measures the cluster, not the CPU.

It wraps the simulator's replica, which asserts what a real one would, into what a replica process
hosts. Its tokens are those of `reference_output`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random

from cluster.frontend.target_text import TargetText
from replicas.config import ReplicaConfig
from scheduler.messages import Batch, BatchKind, Release, ReplicaSpec, StepResult, StepTimes
from scheduler.simulation import SimulatedReplica


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

    def times(self, batch: Batch) -> StepTimes:
        """What one step of a batch takes, or all of a prefill."""
        if batch.kind is BatchKind.SPECULATE:
            return StepTimes(total_s=self.step_s)
        tokens = sum(len(row.tokens) for row in batch.prefill)
        spent_s = self.prefill_s + self.prefill_token_s * tokens
        return StepTimes(prefill_s=spent_s, total_s=spent_s)

    def tokens_per_s(self, rows: int, draft_len: int) -> float:
        """What full batches of so many rows commit, without prefills."""
        per_step = sum(self.acceptance**position for position in range(draft_len + 1))
        return rows * per_step / self.step_s


def synthetic_spec(config: ReplicaConfig) -> ReplicaSpec:
    """A synthetic replica that takes the target's tokens."""
    text = TargetText.load(config)
    return ReplicaSpec(
        kv_blocks=4000,
        block_size=16,
        context_len=text.context_len,
        vocab_size=text.spec.vocab_size,
        target="synthetic",
    )


class SyntheticReplica:
    """Implements HostedReplica."""

    def __init__(self, spec: ReplicaSpec, speed: Speed) -> None:
        self.spec = spec
        self.broken: Exception | None = None
        self._speed = speed
        self._rng = Random(0)
        self._simulated = self._member("")

    def _member(self, replica_id: str) -> SimulatedReplica:
        speed = self._speed
        return SimulatedReplica(
            replica_id, self.spec, speed.times, lambda name: speed.acceptance, self._rng
        )

    @property
    def residents(self) -> tuple[str, ...]:
        return tuple(self._simulated.residents)

    def release(self, sequence_ids: Iterable[str]) -> None:
        """Sequences that are not resident are passed over."""
        gone = tuple(each for each in sequence_ids if each in self._simulated.residents)
        self._simulated.release(Release(self._simulated.id, gone))

    def draft_ahead(self, batch: Batch) -> None:
        """Its spec does not say that it overlaps."""

    def probe(self) -> None:
        """It is always sound."""

    def step(self, batch: Batch, interrupted: Callable[[], bool]) -> StepResult:
        """Sleeps through the batch's steps. Raises AssertionError for a batch that is wrong."""
        if batch.replica_id != self._simulated.id:
            # A new membership; the residents of the old one were released before.
            assert not self.residents, "residents of an earlier membership"
            self._simulated = self._member(batch.replica_id)
        end_s = time.perf_counter()
        self._simulated.receive(batch)
        step_s = self._simulated.begin(batch)
        more = True
        while more:
            # What the simulation itself takes is part of the step.
            end_s += step_s
            more = self._simulated.advance()
            time.sleep(max(0.0, end_s - time.perf_counter()))
            more = more and not interrupted()
        return self._simulated.end()


def synthetic_loader(
    spec: ReplicaSpec, speed: Speed
) -> Callable[[ReplicaConfig], SyntheticReplica]:
    """A factory that can be sent to the replicas' processes."""
    return partial(_load, spec=spec, speed=speed)


def _load(_config: ReplicaConfig, spec: ReplicaSpec, speed: Speed) -> SyntheticReplica:
    time.sleep(speed.start_s)
    return SyntheticReplica(spec, speed)
