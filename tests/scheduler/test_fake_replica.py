"""Proves how a fake replica spreads the draft tokens that a batch lets through."""

from __future__ import annotations

from random import Random

import pytest

from scheduler.fake_replica import FakeReplica, spread
from scheduler.messages import (
    Batch,
    BatchKind,
    PrefillRow,
    ReplicaSpec,
    SamplingParams,
    StepResult,
    StepRow,
)


@pytest.mark.parametrize(
    ("draft_lens", "verify", "checked"),
    [
        ([4, 2, 0], None, [4, 2, 0]),
        ([4, 2, 0], 0, [0, 0, 0]),
        ([4, 2, 0], 1, [1, 0, 0]),
        ([4, 2, 0], 3, [2, 1, 0]),
        ([4, 2, 0], 5, [3, 2, 0]),
        ([4, 2, 0], 99, [4, 2, 0]),
    ],
)
def test_first_tokens_come_before_second_ones(
    draft_lens: list[int], verify: int | None, checked: list[int]
) -> None:
    assert spread(draft_lens, verify) == checked


def run(verify: int | None) -> StepResult:
    replica = FakeReplica("r", ReplicaSpec(64, 4, 256, 100), 1.0, Random(0))
    prefill = tuple(
        PrefillRow(name, (1, 2, 3), 40, SamplingParams(), (), 16) for name in ("a", "b")
    )
    first = Batch(1, "r", BatchKind.PREFILL, prefill=prefill)
    rows = tuple(StepRow(name, 3, 4, 16) for name in ("a", "b"))
    second = Batch(2, "r", BatchKind.SPECULATE, rows=rows, draft_len=4, verify_tokens=verify)
    for batch in (first, second):
        replica.receive(batch)
        result = replica.run(batch, 0.01)
        replica.end(batch)
    return result


def test_only_checked_tokens_count_as_tried_and_are_committed() -> None:
    a, b = run(3).rows
    assert (len(a.tokens), len(b.tokens)) == (3, 2)
    assert (a.tried_at, b.tried_at) == ((1, 1, 0, 0), (1, 0, 0, 0))
    assert a.draft_tokens == b.draft_tokens == 4
    everything = run(None).rows
    assert everything[0].tokens[:3] == a.tokens, "which tokens are committed never changes"


def test_to_verify_none_is_not_to_draft() -> None:
    for row in run(0).rows:
        assert (len(row.tokens), row.draft_tokens, sum(row.tried_at)) == (1, 0, 0)
