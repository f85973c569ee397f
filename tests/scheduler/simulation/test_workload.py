"""Arrivals have the rates asked for, and a seed repeats them."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest

from scheduler.simulation import WorkloadRequest, drawn, lognormal, parse_lengths, poisson, uniform


def test_draws_are_distributed_as_asked_and_a_seed_repeats_them() -> None:
    def requests(seed: int) -> list[WorkloadRequest]:
        rng = Random(seed)
        return drawn(poisson(5, rng), 2000, uniform(3, 9), lognormal(50, 0.5), 0.7, rng)

    made = requests(3)
    assert requests(3) == made != requests(2)
    assert made[-1].at_s == pytest.approx(2000 / 5, rel=0.1)
    assert {one.prompt_tokens for one in made} == set(range(3, 10))
    assert median(one.new_tokens for one in made) == pytest.approx(50, rel=0.1)
    assert [one.at_s for one in made] == sorted(one.at_s for one in made)
    assert {one.at_s for one in drawn(None, 3, uniform(1, 1), uniform(1, 1), 0.7, Random(0))} == {0}


@pytest.mark.parametrize(
    ("text", "lengths"),
    [("7", uniform(7, 7)), ("3..9", uniform(3, 9)), ("lognormal:200:0.8", lognormal(200.0, 0.8))],
)
def test_lengths_are_read_and_cut(text: str, lengths: object) -> None:
    first, second = Random(0), Random(0)
    read = parse_lengths(text)
    assert [read(first) for _ in range(50)] == [lengths(second) for _ in range(50)]  # type: ignore[operator]
    assert max(lognormal(100, 3, most=120)(first) for _ in range(50)) == 120


@pytest.mark.parametrize(
    "text", ["", "0", "9..3", "x", "lognormal:0:1", "lognormal:5", "lognormal:5:-1"]
)
def test_wrong_lengths_say_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected N, N\.\.M or lognormal"):
        parse_lengths(text)
