"""Proves that the draft length is that of the greatest goodput."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.draft_length.goodput import (
    STAY,
    best_draft_len,
    goodputs,
    likelihoods,
)

ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]), st.integers(0, 8)),
    min_size=1,
    max_size=16,
)
"""(acceptance, most draft tokens) of each row."""


def likely_of(rows: list[tuple[float, int]], most: int) -> list[list[float]]:
    return likelihoods([one for one, _ in rows], [limit for _, limit in rows], most)


def test_expected_tokens_are_the_sum_over_rows_up_to_their_limits() -> None:
    likely = likely_of([(0.5, 3), (1.0, 1), (0.9, 0)], 4)
    assert list(accumulate(map(sum, likely))) == pytest.approx([1.5, 1.75, 1.875, 1.875])


@given(ROWS, st.lists(st.floats(1e-3, 1.0), min_size=9, max_size=9), st.integers(0, 20))
def test_no_other_draft_length_is_better_and_the_last_one_stays_while_it_is_as_good(
    rows: list[tuple[float, int]], seconds: list[float], last: int
) -> None:
    """Whatever the times are: they rise in steps, so goodput has several peaks."""
    found = goodputs(likely_of(rows, 8), len(rows), seconds)
    tokens = [
        sum(sum(a**j for j in range(min(k, limit) + 1)) for a, limit in rows) for k in range(9)
    ]
    assert found == pytest.approx([n / s for n, s in zip(tokens, seconds, strict=True)])
    best = best_draft_len(found, last)
    assert found[best] >= STAY * max(found)
    assert best == last or found[best] == max(found)
