"""Proves what is expected of each draft length: its tokens, and its goodput."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from scheduler.draft_length.acceptance import goodputs, likelihoods

ACCEPTANCES = st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0])
ROWS = st.lists(
    st.tuples(ACCEPTANCES, ACCEPTANCES, st.integers(0, 8)),
    min_size=1,
    max_size=16,
)
"""(acceptance of the first draft token, of later ones, most draft tokens) of each row."""


@given(ROWS, st.lists(st.floats(1e-3, 1.0), min_size=9, max_size=9))
def test_goodput_is_expected_tokens_over_time_whatever_the_times(
    rows: list[tuple[float, float, int]], seconds: list[float]
) -> None:
    first, later, limits = zip(*rows, strict=True)
    found = goodputs(likelihoods(first, later, limits, 8), len(rows), seconds)
    tokens = [
        sum(1 + sum(a * b**j for j in range(min(k, limit))) for a, b, limit in rows)
        for k in range(9)
    ]
    assert found == pytest.approx([n / s for n, s in zip(tokens, seconds, strict=True)])
