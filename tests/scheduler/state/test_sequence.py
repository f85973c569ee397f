"""Proves that the table of state changes is the only way on, and what a sequence counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from scheduler.messages import Request, RowResult
from scheduler.state.sequence import LEGAL, Move, Sequence, State


def sequence(**fields: object) -> Sequence:
    return Sequence(Request(**{"id": "a", "prompt": (1, 2), "max_new_tokens": 5, **fields}), 1)


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("move", Move)
def test_a_move_is_in_the_table_or_an_assertion(state: State, move: Move) -> None:
    one = sequence()
    one.state = state
    if (state, move) in LEGAL:
        one.move(move)
        assert one.state is LEGAL[state, move]
    else:
        with pytest.raises(AssertionError, match="no move"):
            one.move(move)
        assert one.state is state


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
    one = sequence(max_new_tokens=1000)
    for drafted, runs in batches:
        accepted_at = tuple(sum(run > place for run in runs) for place in range(drafted))
        row = RowResult("a", (5,) * (sum(runs) + len(runs)), len(runs), 0, accepted_at)
        one.commit(row)
    usage = one.usage()
    every = [run for _, runs in batches for run in runs]
    longest = max((drafted for drafted, _ in batches), default=0)
    assert usage.steps == len(every)
    assert usage.accepted_at == tuple(sum(run > place for run in every) for place in range(longest))
