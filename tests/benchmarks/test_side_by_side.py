"""Proves: ways that run side by side take turns to their end, each pays for its own batches only,
and each is compared with what was expected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.shared.measured import MeasuredWay, side_by_side
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, StepResult
from tests.tiny_pairs import tiny_replica

REQUESTS = [Request(str(n), tuple(range(3, 9 + n)), 10) for n in range(3)]


class Steps:
    """A clock that goes on by a way's own seconds with each batch, and which way ran when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.order: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def way(self, name: str, draft_len: int, batch_s: float) -> MeasuredWay:
        def step(*args: Any) -> StepResult:
            self.order.append(name)
            self.now_s += batch_s
            return REPLICA.step(*args)

        runner: Any = SimpleNamespace(spec=REPLICA.spec, step=step, release=REPLICA.release)
        return MeasuredWay(runner, SchedulerConfig(rows_max=1, draft_len=draft_len), self.clock)


REPLICA = tiny_replica("llama")
EXPECTED = MeasuredWay(REPLICA, SchedulerConfig(rows_max=1, draft_len=0))(REQUESTS)


def test_ways_take_turns_and_pay_for_their_own_batches() -> None:
    steps = Steps()
    ways = {"a": steps.way("a", 0, 1.0), "b": steps.way("b", 0, 2.0)}
    a, b = side_by_side(ways, REQUESTS, 2, EXPECTED, slice_s=2.0)
    assert a.tokens_per_s == pytest.approx([2 * value for value in b.tokens_per_s])
    assert a.tokens_per_s[0] == a.tokens_per_s[1] == 30 / ways["a"].seconds
    assert (a.identical, b.identical, a.prompts) == (3, 3, 3)
    # Two batches of a for each of b, and every other turn the other way round.
    assert "".join(steps.order).startswith("aabbaaaabbaa")
    assert steps.order.count("a") == steps.order.count("b")


def test_every_way_runs_to_its_end_with_its_own_requests() -> None:
    steps = Steps()
    ways = {"short": steps.way("short", 3, 1.0), "long": steps.way("long", 0, 1.0)}
    short, long = side_by_side(ways, REQUESTS, 1, EXPECTED, counts={"short": 1}, slice_s=1.0)
    assert (short.prompts, short.identical, long.prompts, long.identical) == (1, 1, 3, 3)
    assert [len(output.tokens) for output in ways["long"].outputs] == [10] * 3


def test_what_differs_from_the_expected_is_told() -> None:
    steps = Steps()
    wrong = [EXPECTED[0], [*EXPECTED[1][:-1], -1], EXPECTED[2]]
    (only,) = side_by_side({"only": steps.way("only", 0, 1.0)}, REQUESTS, 2, wrong)
    assert only.identical == 2


def test_what_other_ways_do_is_no_time_of_a_way() -> None:
    """A scheduler that took turns of others for slow round trips would decide by them."""
    steps = Steps()
    ways = {name: steps.way(name, 0, 1.0) for name in "ab"}
    side_by_side(ways, REQUESTS, 1, EXPECTED, slice_s=1.0)
    for way in ways.values():
        finished = [output.finished_s for output in way.outputs if output.finished_s is not None]
        assert max(finished) == way.seconds == steps.order.count("a")
