"""Proves: the ways take turns, ratios are of one round, and agreement is counted over all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.shared.measured import Way, ratio, side_by_side
from scheduler.messages import Request
from tests.cluster.fakes import Clock

REQUESTS = [Request(str(n), tuple(range(3, 8 + 3 * n)), 12) for n in range(5)]


def test_ways_take_turns_and_ratios_are_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order, salts = Clock(), list[str](), list[str]()
    right, wrong = [[1, 2], [3, 4]], [[1, 2], [3, 5]]

    def way(name: str, *rounds: tuple[float, list[list[int]]]) -> Way:
        def run(requests: Sequence[Request]) -> list[list[int]]:
            seconds, outputs = rounds[order.count(name)]
            order.append(name)
            salts.extend({request.cache_salt for request in requests})
            clock.now_s += seconds
            return outputs

        return run

    ways = {
        "ours": way("ours", (1.0, right), (4.0, wrong)),
        "theirs": way("theirs", (2.0, right), (4.0, right)),
    }
    monkeypatch.setattr("benchmarks.shared.measured.perf_counter", clock)
    ours, theirs = side_by_side(ways, REQUESTS[:2], 2, right)
    assert order == ["ours", "theirs"] * 2
    # No run finds the prefixes of another.
    assert len(salts) == len(set(salts)) == 4
    assert ours.tokens_per_s == (4.0, 1.0)
    assert ours.speed == 2.5
    assert (ours.identical, theirs.identical) == (1, 2)
    assert ratio((ours, theirs), "ours", "theirs") == 1.5
