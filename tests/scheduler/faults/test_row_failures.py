"""Proves that what one row's request leads to ends that row alone: the others commit what they
would, no batch runs again, and nothing counts against a replica or another request.
"""

from __future__ import annotations

import pytest

from scheduler.messages import (
    BatchKind,
    Emit,
    Finish,
    FinishReason,
    RecordFailure,
    RowFailure,
    RowResult,
    StepDone,
    StepResult,
)
from tests.scheduler.hand import Hand, of_kind, only, released, rows_of

FAILURE = RowFailure("the text cannot go on", "grammar")


def stepping(count: int, **fields: object) -> Hand:
    """So many rows in a step of one token each."""
    hand = Hand(rows_max=8, draft_len=0, steps_per_batch_max=1)
    hand.join()
    for index in range(count):
        hand.submit(f"q{index}", **fields)
    while [len(batch.rows) for batch in hand.settle()] != [count]:
        hand.work()
    return hand


def result(hand: Hand, tokens: tuple[int, ...], failure: RowFailure | None = FAILURE) -> StepDone:
    """Of the batch in flight, whose row q0 fails behind these tokens."""
    (batch,) = hand.in_flight()
    rows = [RowResult(name, (1,), 1) for name in rows_of(batch) if name != "q0"]
    rows.append(RowResult("q0", tokens, 1, failure=failure))
    return StepDone(StepResult(batch.id, batch.replica_id, tuple(rows), steps=1))


@pytest.mark.parametrize("tokens", [(), (7,), (7, 8)])
def test_a_row_that_fails_ends_behind_its_tokens_with_the_field_at_fault(
    tokens: tuple[int, ...],
) -> None:
    hand = stepping(1)
    actions = hand.tell(result(hand, tokens))
    end = only(actions, Finish)
    assert (end.reason, end.message, end.field) == (
        FinishReason.FAILED,
        FAILURE.message,
        FAILURE.field,
    )
    assert end.usage.completion_tokens == len(tokens)
    assert sum((emit.tokens for emit in of_kind(actions, Emit)), ()) == tokens
    assert released(actions) == ["q0"]
    assert hand.used() == 0


def test_the_other_rows_of_its_batch_commit_and_step_on_together() -> None:
    hand = stepping(8)
    actions = hand.tell(result(hand, ()))
    assert {emit.request_id for emit in of_kind(actions, Emit)} == {f"q{n}" for n in range(1, 8)}
    assert of_kind(actions, RecordFailure) == []
    assert not any(
        sequence.quarantined or sequence.record.failures for sequence in hand.sequences()
    )
    (batch,) = hand.in_flight()
    assert sorted(rows_of(batch)) == [f"q{index}" for index in range(1, 8)]
    while hand.in_flight():
        hand.work()
    ends = [end.reason for name, end in hand.finishes.items() if name != "q0"]
    assert ends == [FinishReason.LENGTH] * 7


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_new_tokens": 1}, FinishReason.LENGTH),
        ({"stop_token_ids": (9,)}, FinishReason.STOP),
    ],
)
def test_a_row_that_has_ended_with_its_tokens_did_not_fail(
    fields: dict[str, object], reason: FinishReason
) -> None:
    """A draft may reach beyond the end of the text, where nothing need be possible any more."""
    hand = stepping(1, **fields)
    assert only(hand.tell(result(hand, (9,))), Finish).reason is reason


def test_what_cannot_be_told_of_a_prompt_ends_its_row_alone() -> None:
    hand = Hand(rows_max=8, draft_len=0)
    hand.join()
    hand.tick(0.0)
    for name in ("q0", "q1"):
        hand.submit(name)
    batches = hand.in_flight()
    assert {batch.kind for batch in batches} == {BatchKind.PREFILL}
    (batch,) = (batch for batch in batches if "q0" in rows_of(batch))
    failures = {"q0": RowFailure("its answer cannot be sent")}
    rows = tuple(RowResult(name, failure=failures.get(name)) for name in rows_of(batch))
    hand.tell(StepDone(StepResult(batch.id, batch.replica_id, rows)))
    assert hand.finishes["q0"].reason is FinishReason.FAILED
    assert hand.finishes["q0"].field == ""
    while hand.in_flight():
        hand.work()
    assert hand.finishes["q1"].reason is FinishReason.LENGTH
