"""What a simulated world needs of a replica."""

from __future__ import annotations

from typing import Protocol

from scheduler.messages import Order, Release, ReplicaSpec, StepResult


class SimulatedRun(Protocol):
    """One order under way."""

    def advance(self) -> bool:
        """Does a step and says whether there is another."""

    def result(self, step_s: float) -> StepResult:
        """What was committed so far, in steps of so many seconds."""


class SimulatedReplica(Protocol):
    """What a world needs of a replica; `FakeReplica` is one."""

    id: str
    spec: ReplicaSpec

    def receive(self, order: Order) -> None:
        """Takes an order into the queue."""

    def begin(self, order: Order) -> SimulatedRun:
        """Starts a received order."""

    def end(self, order: Order) -> None:
        """The order is over, run or failed."""

    def fail(self, order: Order) -> None:
        """The order could not be run."""

    def release(self, action: Release) -> None:
        """Sequences leave it."""
