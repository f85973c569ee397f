"""Proves that the table of state changes is the only way on, and where new tokens are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from scheduler.messages import FinishReason, Request, RowResult
from scheduler.state.sequence import LEGAL, Move, Sequence, State, truncate


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


@pytest.mark.parametrize(
    ("tokens", "left", "stop", "kept", "reason"),
    [
        ((5, 6), 5, (), (5, 6), None),
        ((5, 6), 2, (), (5, 6), FinishReason.LENGTH),
        ((5, 6, 7), 2, (), (5, 6), FinishReason.LENGTH),
        ((5, 9, 7), 5, (9,), (5, 9), FinishReason.STOP),
        ((9, 9, 9), 5, (9,), (9,), FinishReason.STOP),
        ((5, 9), 2, (9,), (5, 9), FinishReason.STOP),
        ((5, 6, 9), 2, (9,), (5, 6), FinishReason.LENGTH),
        ((5, 8, 9), 5, (9, 8), (5, 8), FinishReason.STOP),
        ((), 5, (9,), (), None),
    ],
)
def test_new_tokens_are_cut_at_the_first_stop_token_or_the_limit(
    tokens: tuple[int, ...],
    left: int,
    stop: tuple[int, ...],
    kept: tuple[int, ...],
    reason: FinishReason | None,
) -> None:
    assert truncate(tokens, left, stop) == (kept, reason)


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    one = sequence(prompt=(9, 1, 9), stop_token_ids=(9,))
    assert one.commit(RowResult("a", (5, 6), 1)) == ((5, 6), None)
    assert one.commit(RowResult("a", (9, 6), 1)) == ((9,), FinishReason.STOP)


def test_a_finished_sequence_refuses_tokens() -> None:
    one = sequence()
    one.move(Move.FINISH)
    with pytest.raises(AssertionError):
        one.commit(RowResult("a", (5,), 1))
    assert one.committed == []


runs_of_an_batch = st.integers(0, 4).flatmap(
    lambda drafted: st.tuples(
        st.just(drafted), st.lists(st.integers(0, drafted), min_size=1, max_size=3)
    )
)


@settings(max_examples=200, deadline=None)
@given(st.lists(runs_of_an_batch, max_size=6))
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
