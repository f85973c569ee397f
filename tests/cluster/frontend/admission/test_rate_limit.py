"""Proves: no more than the rate is ever used, and whoever waits as long as told gets in."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from cluster.frontend.admission.rate_limit import TokenBucket

EVENTS = st.lists(
    st.tuples(
        st.floats(0, 30),  # seconds until the request comes
        st.integers(1, 3000),  # its tokens
        st.floats(0, 1),  # the share that it uses
    ),
    max_size=60,
)


@given(size=st.integers(1, 1000), events=EVENTS)
def test_no_more_than_the_rate_is_ever_used(
    size: int, events: list[tuple[float, int, float]]
) -> None:
    """Over the whole run: a full bucket, what came in meanwhile, and one request's debt."""
    bucket = TokenBucket(size, 0.0)
    now_s, used, largest = 0.0, 0, 0
    for pause_s, tokens, share in events:
        now_s += pause_s
        if bucket.take(tokens, now_s) > 0:
            continue
        spent = math.floor(tokens * share)
        bucket.give_back(tokens - spent, now_s)
        used += spent
        largest = max(largest, tokens)
        # Before this request, no more than the bucket and its inflow can have been used.
        assert used - spent <= size + now_s * size / 60 + max(largest - size, 0) + 1e-6
    assert used <= size + now_s * size / 60 + max(largest - size, 0) + 1e-6


@given(size=st.integers(1, 1000), tokens=st.integers(1, 5000), events=EVENTS)
def test_whoever_waits_as_long_as_told_gets_in(
    size: int, tokens: int, events: list[tuple[float, int, float]]
) -> None:
    bucket = TokenBucket(size, 0.0)
    now_s = 0.0
    for pause_s, other, _share in events:
        now_s += pause_s
        bucket.take(other, now_s)
    wait_s = bucket.take(tokens, now_s)
    if wait_s > 0:
        # Waits are told in whole seconds, rounded up.
        assert bucket.take(tokens, now_s + math.ceil(wait_s + 1e-6)) == 0.0


@given(size=st.integers(1, 1000), events=EVENTS)
def test_giving_back_never_fills_it_over_its_size(
    size: int, events: list[tuple[float, int, float]]
) -> None:
    bucket = TokenBucket(size, 0.0)
    now_s = 0.0
    for pause_s, tokens, _share in events:
        now_s += pause_s
        bucket.give_back(tokens, now_s)
        assert bucket.take(size, now_s) == 0.0
        assert bucket.take(1, now_s) > 0
        bucket.give_back(size, now_s)


def test_a_clock_that_stands_still_gives_nothing() -> None:
    bucket = TokenBucket(60, 5.0)
    assert bucket.take(60, 5.0) == 0.0
    assert bucket.take(1, 4.0) == pytest.approx(1.0), "nor one that goes back"
    assert bucket.take(1, 5.0) == pytest.approx(1.0)
