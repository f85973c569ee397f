"""Proves what is expected of each draft length: its tokens, and its goodput."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from scheduler.draft_length.acceptance import goodputs, likelihoods

ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]), st.integers(0, 8)),
    min_size=1,
    max_size=16,
)
"""(acceptance, most draft tokens) of each row."""


def likely_of(rows: list[tuple[float, int]], most: int) -> list[list[float]]:
    return likelihoods([one for one, _ in rows], [limit for _, limit in rows], most)


@given(ROWS, st.lists(st.floats(1e-3, 1.0), min_size=9, max_size=9))
def test_goodput_is_expected_tokens_over_time_whatever_the_times(
    rows: list[tuple[float, int]], seconds: list[float]
) -> None:
    found = goodputs(likely_of(rows, 8), len(rows), seconds)
    tokens = [
        sum(sum(a**j for j in range(min(k, limit) + 1)) for a, limit in rows) for k in range(9)
    ]
    assert found == pytest.approx([n / s for n, s in zip(tokens, seconds, strict=True)])
