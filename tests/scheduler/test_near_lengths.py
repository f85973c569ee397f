"""Proves that lengths that are brought up to date seldom are right whenever somebody asks."""

from __future__ import annotations

from random import Random

import pytest

from scheduler.messages import Request
from scheduler.near_lengths import NearLengths
from scheduler.sequence import Sequence


@pytest.mark.parametrize("seed", range(20))
def test_it_says_what_a_search_of_all_says(seed: int) -> None:
    rng = Random(seed)
    index, inside = NearLengths(), []
    for number in range(300):
        chance = rng.random()
        if chance < 0.3 or not inside:
            inside.append(Sequence(Request(str(number), (1,) * rng.randint(1, 40), 500), number))
            index.add(inside[-1])
        elif chance < 0.5:
            index.remove(inside.pop(rng.randrange(len(inside))))
        elif chance < 0.9:
            some = rng.sample(inside, rng.randint(1, len(inside)))
            for one in some:
                one.length += rng.randint(0, 4)
            index.grown(some)
            index.check_integrity(inside)
        else:
            length = rng.randint(1, 60)
            away = [abs(one.length - length) for one in inside]
            assert index.distance(length) == min(away, default=0)
            assert index.rising() == sorted(one.length for one in inside)


def test_a_look_finds_what_nobody_has_told_and_changes_nothing() -> None:
    index = NearLengths()
    one, other = (Sequence(Request(name, (1, 2), 500), 1) for name in "ab")
    index.add(one)
    index.add(other)
    one.length += 1
    with pytest.raises(AssertionError, match="a has grown"):
        index.check_integrity([one, other])
    index.grown([one])
    index.check_integrity([one, other])
    assert index._rising == [2, 2]
    assert index.rising() == [2, 3]
    index.check_integrity([one, other])
    with pytest.raises(AssertionError, match="lengths of others"):
        index.check_integrity([one])
