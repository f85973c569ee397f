"""Proves that the rate is that of the last seconds, also at the start and after a pause."""

from __future__ import annotations

import pytest

from scheduler.state.pool import WINDOW_S, RateMeter


def test_a_steady_rate_is_seen_from_the_start_on() -> None:
    meter = RateMeter()
    assert meter.per_s(0.0) == 0.0
    for tenth in range(1, 301):
        meter.add(7, 5.0 + tenth / 10)
        if tenth > 20:
            assert meter.per_s(5.0 + tenth / 10) == pytest.approx(70.0, rel=0.11)


def test_a_first_burst_is_not_taken_for_a_rate_per_instant() -> None:
    meter = RateMeter()
    meter.add(100, 50.0)
    assert meter.per_s(50.0) == 100.0


def test_a_pause_is_forgotten_after_the_window() -> None:
    meter = RateMeter()
    meter.add(1000, 3.0)
    assert meter.per_s(3.5 + WINDOW_S / 2) > 0
    assert meter.per_s(4.0 + WINDOW_S) == 0.0
    meter.add(100, 1000.0)
    assert meter.per_s(1001.0) == 100.0, "the pause is no part of the rate after it"
