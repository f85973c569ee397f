"""Proves: the ways take turns, ratios are of one round, and agreement is counted over all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.shared.measured import Way, ratio, take_turns
from benchmarks.shared.transformers_runs import Transformers
from scheduler.messages import Request
from tests.reference import plain_greedy
from tests.tiny_pairs import target_model, tiny_pair

REQUESTS = [Request(str(n), tuple(range(3, 8 + 3 * n)), 12) for n in range(5)]


class Turns:
    """Ways whose runs take a given time, and the order in which they ran."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.order: list[str] = []
        self.salts: list[str] = []

    def way(self, name: str, seconds: Sequence[float], outputs: Sequence[list[list[int]]]) -> Way:
        def run(requests: Sequence[Request]) -> list[list[int]]:
            number = self.order.count(name)
            self.order.append(name)
            self.salts += {request.cache_salt for request in requests}
            self.now_s += seconds[number]
            return outputs[number]

        return run

    def clock(self) -> float:
        return self.now_s


def test_ways_take_turns_and_ratios_are_of_one_round() -> None:
    turns = Turns()
    right, wrong = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    ways = {
        "ours": turns.way("ours", [1.0, 4.0], [right, wrong]),
        "theirs": turns.way("theirs", [2.0, 4.0], [right, right]),
    }
    ours, theirs = take_turns(ways, REQUESTS[:2], 2, right, clock=turns.clock)
    assert turns.order == ["ours", "theirs"] * 2
    # No run finds the prefixes of another.
    assert len(turns.salts) == len(set(turns.salts)) == 4
    assert ours.tokens_per_s == (4.0, 1.0)
    assert ours.speed == 2.5
    assert (ours.identical, theirs.identical) == (1, 2)
    assert ratio((ours, theirs), "ours", "theirs") == 1.5
    assert ratio((ours, theirs), "ours", "others") is None


@pytest.fixture(scope="module")
def models() -> Transformers:
    pair = tiny_pair("llama")
    return Transformers(target_model("llama"), pair.draft.model)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [plain_greedy(target_model("llama"), request.prompt, 12) for request in REQUESTS]


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_batched_generate_returns_the_callers_order(
    models: Transformers, expected: list[list[int]], batch: int
) -> None:
    shuffled = [REQUESTS[n] for n in (3, 0, 4, 2, 1)]
    assert models.batched(shuffled, batch) == [expected[n] for n in (3, 0, 4, 2, 1)]
