"""Proves what a sequence counts, and what its tokens clear it of."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from scheduler.messages import FailureRecord, Request, RowResult
from scheduler.state.sequence import Sequence

runs_of_a_batch = st.integers(0, 4).flatmap(
    lambda drafted: st.tuples(
        st.just(drafted), st.lists(st.integers(0, drafted), min_size=1, max_size=3)
    )
)


@settings(max_examples=200, deadline=None)
@given(st.lists(runs_of_a_batch, max_size=6))
def test_accepted_tokens_are_counted_by_their_place_in_the_draft(
    batches: list[tuple[int, list[int]]],
) -> None:
    """Over batches of one step and of several, whatever their draft lengths."""
    one = Sequence(Request("a", (1, 2), 1000), 1)
    for drafted, runs in batches:
        accepted_at = tuple(sum(run > place for run in runs) for place in range(drafted))
        tokens, steps = (5,) * (sum(runs) + len(runs)), len(runs)
        tried_at = tuple(sum(run >= place for run in runs) for place in range(drafted))
        row = RowResult("a", tokens, steps, 0, accepted_at, tried_at)
        one.commit(row)
    usage = one.usage()
    every = [run for _, runs in batches for run in runs]
    longest = max((drafted for drafted, _ in batches), default=0)
    assert usage.steps == len(every)
    assert usage.drafts == sum(len(runs) for drafted, runs in batches if drafted)
    assert usage.accepted_at == tuple(sum(run > place for run in every) for place in range(longest))


def test_the_replicas_where_it_failed_are_excluded_as_long_as_it_is_in_quarantine() -> None:
    record = FailureRecord(failures=1, rows_limit=1, broke_at=3, quarantined_until=4)
    one = Sequence(Request("a", (1, 2), 1000), 1, record=record, excluded_replicas=["r"])
    found = []
    for _ in range(3):
        one.commit(RowResult("a", (5,), 1))
        found.append((one.record.failures, one.quarantined, one.excluded_replicas[:]))
    assert found == [(1, True, ["r"]), (0, True, ["r"]), (0, False, [])]
