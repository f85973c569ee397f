"""Proves where the draft length comes from: the policy, capped by request and by tokens left."""

from __future__ import annotations

import pytest

from scheduler.config import SchedulerConfig
from scheduler.messages import (
    Dispatch,
    Order,
    ReplicaJoined,
    ReplicaLost,
    ReplicaSpec,
    Request,
    RowResult,
    StepDone,
    StepResult,
    Submit,
)
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.speculation import FixedDraft, row_draft_len


@pytest.mark.parametrize(
    ("policy", "cap", "tokens_left", "expected"),
    [(4, None, 100, 4), (4, 2, 100, 2), (4, 0, 100, 0), (0, 3, 100, 0), (4, 9, 3, 2), (4, 9, 1, 0)],
)
def test_a_row_drafts_the_least_of_policy_cap_and_tokens_left_but_one(
    policy: int, cap: int | None, tokens_left: int, expected: int
) -> None:
    sequence = Sequence(Request("a", (1,), tokens_left, draft_len=cap), 1)
    assert row_draft_len(sequence, policy) == expected


def test_a_fixed_draft_never_changes() -> None:
    draft = FixedDraft(3)
    draft.observe(Order(1, "r", "speculate"), StepResult(1, "r", ()))
    assert draft.draft_len("r", []) == 3


class Recorder(FixedDraft):
    """Writes down what a policy is told."""

    def __init__(self) -> None:
        super().__init__(2)
        self.told: list[str] = []

    def joined(self, replica_id: str, spec: ReplicaSpec) -> None:
        self.told.append(f"joined {replica_id}")

    def lost(self, replica_id: str) -> None:
        self.told.append(f"lost {replica_id}")

    def draft_len(self, replica_id: str, rows: list[Sequence]) -> int:
        self.told.append(f"asked {[row.length for row in rows]}")
        return 2

    def observe(self, order: Order, result: StepResult) -> None:
        self.told.append(f"observed {order.kind}")


def test_a_policy_of_ones_own_is_asked_per_order_and_told_every_result() -> None:
    policy = Recorder()
    scheduler = Scheduler(SchedulerConfig(), policy)
    scheduler.step(ReplicaJoined("r", ReplicaSpec(100, 4, 100, 100)), 0.0)
    scheduler.step(Submit(Request("a", (1, 2, 3), 9)), 0.0)
    (action,) = scheduler.step(StepDone(StepResult(1, "r", (RowResult("a"),))), 0.0)
    assert isinstance(action, Dispatch)
    assert action.order.draft_len == 2
    scheduler.step(StepDone(StepResult(1, "r", (RowResult("a"),))), 0.0)
    scheduler.step(ReplicaLost("r"), 0.0)
    assert policy.told == ["joined r", "observed prefill", "asked [3]", "lost r"]
