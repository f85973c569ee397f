"""How many tokens the draft proposes: a policy is asked per order and told every result.

The choice never changes what a request receives, only how fast. A policy has no clock and draws
nothing at random, or the scheduler would no longer replay.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

from scheduler.messages import Order, ReplicaSpec, StepResult
from scheduler.sequence import Sequence


class DraftPolicy(Protocol):
    """Chooses k, the draft tokens per row and step, for each speculate order."""

    def joined(self, replica_id: str, spec: ReplicaSpec) -> None:
        """A replica is there; called once per incarnation."""

    def lost(self, replica_id: str) -> None:
        """That replica is gone for good."""

    def draft_len(self, replica_id: str, rows: Rows[Sequence]) -> int:
        """k for the next order with these rows, at least 0; a request may cap its own row."""

    def prefill_tokens(self, replica_id: str, ready_rows: int, most: int) -> int:
        """KV positions that the next prefill order may fill, in [1, most], while so many rows are
        ready: each of them waits for it."""

    def observe(self, order: Order, result: StepResult) -> None:
        """An order is done: its times, and what its rows accepted."""


class FixedDraft:
    """The same k for every order; 0 turns speculation off."""

    def __init__(self, draft_len: int) -> None:
        self._draft_len = draft_len

    def joined(self, replica_id: str, spec: ReplicaSpec) -> None:
        """Nothing to learn."""

    def lost(self, replica_id: str) -> None:
        """Nothing to forget."""

    def draft_len(self, replica_id: str, rows: Rows[Sequence]) -> int:
        return self._draft_len

    def prefill_tokens(self, replica_id: str, ready_rows: int, most: int) -> int:
        return most

    def observe(self, order: Order, result: StepResult) -> None:
        """A fixed choice learns nothing."""


def row_draft_len(sequence: Sequence, policy_draft_len: int) -> int:
    """Draft tokens of one row: the policy's, the request's cap, and never beyond its limit.

    The target adds one token of its own, so a row with n tokens left drafts at most n - 1.
    """
    draft_len = min(policy_draft_len, sequence.tokens_left - 1)
    cap = sequence.request.draft_len
    return draft_len if cap is None else min(draft_len, cap)
