"""Proves that the fits of scaling laws find the laws that points were made by, and say how sure
they are."""

from __future__ import annotations

import math
from random import Random

import pytest

from replicas.training import Point, fit

TOKENS = (10_000, 40_000, 160_000, 640_000)
PARAMETERS = (2_000_000, 5_000_000, 9_000_000)


def points(noise: float) -> list[Point]:
    rng = Random(0)
    return [
        Point(n, p, 0.3 * math.log(n) + 0.1 * math.log(p) - 3 + rng.gauss(0, noise))
        for n in TOKENS
        for p in PARAMETERS
    ]


def test_a_law_without_noise_is_found() -> None:
    found = fit(points(0), "tokens", "parameters")
    assert found.slopes == pytest.approx((0.3, 0.1))
    assert found.intervals == pytest.approx((0, 0), abs=1e-6)
    assert found.r2 == pytest.approx(1)
    assert found.at(20_000, 3e6) == pytest.approx(0.3 * math.log(2e4) + 0.1 * math.log(3e6) - 3)
    assert found.doubled("tokens")[0] == pytest.approx(0.3 * math.log(2))


def test_noise_widens_the_interval_around_the_law() -> None:
    found = fit(points(0.05), "tokens", "parameters")
    assert found.r2 < 1
    for slope, width, true in zip(found.slopes, found.intervals, (0.3, 0.1), strict=True):
        assert width > 0
        assert abs(slope - true) < 2 * width
    assert fit(points(0.2), "tokens", "parameters").intervals[0] > found.intervals[0]


def test_points_that_tell_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="what parameters bring"):
        fit([point for point in points(0) if point.parameters == PARAMETERS[0]], "parameters")
    with pytest.raises(ValueError, match="0 points"):
        fit([], "tokens")
