"""What a simulated world needs of a replica."""

from __future__ import annotations

from typing import Protocol

from scheduler.messages import Batch, Release, ReplicaSpec, StepResult


class SimulatedRun(Protocol):
    """One batch under way."""

    def advance(self) -> bool:
        """Does a step and says whether there is another."""

    def result(self, step_s: float) -> StepResult:
        """What was committed so far, in steps of so many seconds."""


class SimulatedReplica(Protocol):
    """What a world needs of a replica; `FakeReplica` is one."""

    id: str
    spec: ReplicaSpec

    def receive(self, batch: Batch) -> None:
        """Takes a batch into the queue."""

    def begin(self, batch: Batch) -> SimulatedRun:
        """Starts a received batch."""

    def end(self, batch: Batch) -> None:
        """The batch is over, run or failed."""

    def fail(self, batch: Batch) -> None:
        """The batch could not be run."""

    def release(self, action: Release) -> None:
        """Sequences leave it."""
