"""A replica that takes time and commits tokens without content: for studies of many requests.

Unlike `FakeReplica` it checks nothing, so it says what a schedule costs, never whether it is right.
How many draft tokens are accepted is drawn per row and step from that request's own acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from scheduler.messages import (
    Batch,
    BatchKind,
    Release,
    ReplicaSpec,
    RowResult,
    StepResult,
    StepTimes,
)

TOKEN = 1
"""What every step commits."""

Acceptance = Callable[[str], float]
"""Probability, by request, that a draft token is accepted if those before it were."""

Times = Callable[[Batch], StepTimes]
"""What one step of a batch takes, or all of a prefill."""


class TimedReplica:
    """Implements `SimulatedReplica`."""

    def __init__(
        self, replica_id: str, spec: ReplicaSpec, times: Times, acceptance: Acceptance, rng: Random
    ) -> None:
        self.id = replica_id
        self.spec = spec
        self.times = times
        self.acceptance = acceptance
        self.rng = rng
        self.tokens_left: dict[str, int] = {}
        """Of its residents."""

    def receive(self, batch: Batch) -> None:
        for row in batch.prefill:
            if row.tokens:
                self.tokens_left[row.sequence_id] = row.tokens_left

    def begin(self, batch: Batch) -> TimedRun:
        return TimedRun(self, batch)

    def end(self, batch: Batch) -> None:
        """It holds no rows."""

    def fail(self, batch: Batch) -> None:
        for row in batch.prefill:
            self.tokens_left.pop(row.sequence_id, None)

    def release(self, action: Release) -> None:
        for sequence_id in action.sequence_ids:
            self.tokens_left.pop(sequence_id, None)


class TimedRun:
    """Implements `SimulatedRun`."""

    def __init__(self, replica: TimedReplica, batch: Batch) -> None:
        self._replica = replica
        self._batch = batch
        self._times = replica.times(batch)
        self._committed = [0] * len(batch.rows)
        self._drafted = [0] * len(batch.rows)
        self._accepted_at = [[0] * batch.draft_len for _ in batch.rows]
        self._tried_at = [[0] * batch.draft_len for _ in batch.rows]
        self._steps = self._own = self._read = 0

    def advance(self) -> bool:
        self._steps += 1
        batch, replica = self._batch, self._replica
        if batch.kind is BatchKind.PREFILL:
            return False
        finished = False
        widest = 0
        for index, row in enumerate(batch.rows):
            left = replica.tokens_left[row.sequence_id]
            draft_len = min(row.draft_len, left - 1)
            accepted = self._accepted(replica.acceptance(row.sequence_id), draft_len)
            width = row.length + self._committed[index] + draft_len
            widest = max(widest, width)
            self._own += width
            self._committed[index] += accepted + 1
            self._drafted[index] += draft_len
            accepted_at, tried_at = self._accepted_at[index], self._tried_at[index]
            for position in range(accepted):
                accepted_at[position] += 1
                tried_at[position] += 1
            if accepted < draft_len:
                tried_at[accepted] += 1
            replica.tokens_left[row.sequence_id] = left - accepted - 1
            finished = finished or left == accepted + 1
        self._read += widest * len(batch.rows)
        return self._steps < batch.steps and not finished

    def _accepted(self, acceptance: float, draft_len: int) -> int:
        """Draft tokens before the first that is refused: geometric, cut at the draft length."""
        if draft_len == 0 or acceptance <= 0:
            return 0
        if acceptance >= 1:
            return draft_len
        drawn = math.log(1.0 - self._replica.rng.random()) / math.log(acceptance)
        return min(int(drawn), draft_len)

    def result(self, step_s: float) -> StepResult:
        batch, times = self._batch, self._times
        if batch.kind is BatchKind.PREFILL:
            filled = tuple(RowResult(row.sequence_id) for row in batch.prefill)
            return StepResult(batch.id, batch.replica_id, filled, times=times)
        rows = tuple(
            RowResult(
                row.sequence_id,
                (TOKEN,) * self._committed[index],
                self._steps,
                self._drafted[index],
                tuple(self._accepted_at[index]),
                tuple(self._tried_at[index]),
            )
            for index, row in enumerate(batch.rows)
        )
        whole = StepTimes(
            draft_s=times.draft_s * self._steps,
            verify_s=times.verify_s * self._steps,
            total_s=step_s * self._steps,
        )
        return StepResult(
            batch.id, batch.replica_id, rows, self._steps, whole, self._own, self._read
        )
