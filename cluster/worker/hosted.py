"""What a worker hosts, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from scheduler.messages import Batch, ReplicaSpec, StepResult


class HostedReplica(Protocol):
    """What is hosted; `replicas.replica.Replica` is one. Called from one thread, but
    for `draft_ahead`."""

    spec: ReplicaSpec

    def step(self, batch: Batch, interrupted: Callable[[], bool]) -> StepResult:
        """`interrupted` is asked after each step; the batch ends early once it says so.

        What a row's request leads to is in the row's result. An error is that batch's alone, unless
        the replica is `broken` then, or its `probe` raises.
        """
        ...

    def draft_ahead(self, batch: Batch) -> None:
        """The batch is the next but for those in hand: begin to draft. Called before `step`, by
        another thread, of a replica whose spec says that it overlaps."""
        ...

    def release(self, sequence_ids: Iterable[str]) -> None: ...

    def probe(self) -> None:
        """Run small batches of its own, of each kind; raises if the replica cannot."""
        ...

    @property
    def residents(self) -> tuple[str, ...]: ...

    @property
    def broken(self) -> Exception | None:
        """Why nothing can run here any more; any thread may ask."""
        ...


class ReplicaUnhealthy(RuntimeError):
    """The process should be replaced; `by_batch` if the batch in hand may be the reason."""

    def __init__(self, message: str, by_batch: bool = False) -> None:
        super().__init__(message)
        self.by_batch = by_batch
