"""`Ordered` holds what a sorted list would, whatever is added and removed, chunk by chunk."""

from __future__ import annotations

from bisect import insort
from random import Random

import pytest

from scheduler import ordered
from scheduler.ordered import Key, Ordered


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rising", [0.0, 0.5, 1.0])
def test_it_is_a_sorted_list(seed: int, rising: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "CHUNK", 4)
    draw = Random(seed)
    keys, plain = Ordered(), list[Key]()
    for number in range(300):
        at = number if draw.random() < rising else draw.randrange(40)
        key = (float(at), number, str(number))
        keys.add(key)
        insort(plain, key)
        while plain and draw.random() < draw.choice([0.3, 0.6]):
            keys.remove(plain.pop(draw.choice([0, -1, draw.randrange(len(plain))])))
        assert list(keys) == plain
        assert len(keys) == len(plain)
    for key in draw.sample(plain, len(plain)):
        keys.remove(key)
    assert (list(keys), len(keys)) == ([], 0)


@pytest.mark.parametrize("absent", [0.5, 1.0, 3.0])
def test_removing_what_is_not_there_is_a_broken_invariant(absent: float) -> None:
    keys = Ordered()
    for number in range(3):
        keys.add((float(number), number, "x"))
    with pytest.raises(AssertionError, match="not there"):
        keys.remove((absent, 9, "x"))
