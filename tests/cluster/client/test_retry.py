"""Proves: every call gives up within its bounds, and only what may be asked again is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from hypothesis import example, given, strategies as st

from cluster.client import RetryPolicy
from cluster.client.core import Core
from cluster.client.retry import Attempts, own_error
from protos import lockstep_pb2 as pb


class Broken:
    """The first attempt of a call ends with this error at this time. There is no other: a client
    that pauses would make one."""

    def __init__(self, error: grpc.RpcError, at_s: float) -> None:
        self.error, self._at_s = error, at_s
        self._now_s = 0.0

    def core(self, policy: RetryPolicy) -> Core:
        return Core(grpc.insecure_channel, self, "localhost:1", None, policy, lambda: self._now_s)

    async def ask(self, method: Any, request: Any, **options: Any) -> Any:
        self._now_s = self._at_s
        raise self.error

    async def read(self, call: Any) -> Any:
        raise NotImplementedError

    async def pause(self, seconds: float) -> None:
        raise PausedError


class PausedError(Exception):
    """A further attempt would come."""


LOST = own_error(StatusCode.UNAVAILABLE, "")


@given(
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=100),
    backoff_s=st.floats(0, 1),
    longest_s=st.floats(0, 4),
    attempts_max=st.integers(1, 40) | st.just(2_000),
    give_up_s=st.floats(0, 100),
    deadline_s=st.none() | st.floats(0.1, 100),
)
def test_every_call_gives_up_within_its_bounds(
    draws: list[float],
    backoff_s: float,
    longest_s: float,
    attempts_max: int,
    give_up_s: float,
    deadline_s: float | None,
) -> None:
    policy = RetryPolicy(
        attempts_max=attempts_max, give_up_s=give_up_s, backoff_s=backoff_s, backoff_s_max=longest_s
    )
    luck = itertools.cycle(draws)
    attempts = Attempts(policy, 50.0, (deadline_s, None), lambda: next(luck))
    now_s, failures = 50.0, 0
    while (pause_s := attempts.pause_s(LOST, now_s, reached=True)) is not None:
        failures += 1
        assert 0 <= pause_s <= longest_s
        now_s += pause_s
        assert now_s <= 50.0 + give_up_s
        assert deadline_s is None or now_s < 50.0 + deadline_s
    assert failures < attempts_max


def test_progress_starts_the_count_anew_and_time_of_service_is_none_of_failing() -> None:
    """A unary call brings nothing before its end: minutes of it do not use up its patience."""
    attempts = Attempts(RetryPolicy(attempts_max=2, give_up_s=60, backoff_s=0.0), 0.0)
    for now_s in range(200, 1200, 100):
        assert attempts.served(now_s)
        assert attempts.pause_s(LOST, now_s, reached=True) is not None
        attempts.progress()
    assert attempts.pause_s(LOST, 1300, reached=True) is not None
    assert attempts.pause_s(LOST, 1300, reached=True) is None
    fruitless = Attempts(RetryPolicy(give_up_s=60), 0.0)
    for now_s in (200, 300, 450):
        assert fruitless.pause_s(LOST, now_s, reached=True) is not None


@given(
    lasted_s=st.floats(0, 59.9),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=1),
    reached=st.booleans(),
)
@example(lasted_s=59.9, draws=[0.0], reached=True)
def test_attempts_in_a_row_that_fail_slowly_use_up_its_patience_which_is_short_for_a_stranger(
    lasted_s: float, draws: list[float], reached: bool
) -> None:
    """All of them shorter than it: a longer one was served, which is no failing."""
    policy = RetryPolicy(attempts_max=10_000, give_up_s=60, reach_s=2)
    patience_s = policy.give_up_s if reached else policy.reach_s
    luck = itertools.cycle(draws)
    attempts = Attempts(policy, 0.0, (), lambda: next(luck))
    now_s = lasted_s
    while (pause_s := attempts.pause_s(LOST, now_s, reached=reached)) is not None:
        now_s += pause_s + lasted_s
    # It fails first after one attempt, and the last attempt begins within patience.
    assert lasted_s + patience_s - policy.backoff_s_max <= now_s <= 2 * lasted_s + patience_s


@pytest.mark.parametrize(
    ("code", "lasted_s", "reached"),
    [
        (StatusCode.UNAVAILABLE, 1.0, False),
        (StatusCode.UNAVAILABLE, 30.0, True),
        (StatusCode.NOT_FOUND, 0.0, True),
        (StatusCode.DEADLINE_EXCEEDED, 0.5, False),
        (StatusCode.RESOURCE_EXHAUSTED, 0.5, False),
    ],
)
def test_what_only_a_server_can_have_done_shows_that_one_was_reached(
    code: StatusCode, lasted_s: float, reached: bool
) -> None:
    """Then the next call is patient with one that cannot be reached."""
    broken = Broken(own_error(code, ""), lasted_s)
    core = broken.core(RetryPolicy(reach_s=0.0))
    with contextlib.suppress(grpc.RpcError, PausedError):
        asyncio.run(core.generate(pb.GenerateRequest(prompt="x")))
    broken.error = LOST
    with pytest.raises(PausedError if reached else grpc.RpcError):
        asyncio.run(core.generate(pb.GenerateRequest(prompt="x")))


@pytest.mark.parametrize(
    "wrong",
    [{"attempts_max": 0}, {"give_up_s": -1}, {"backoff_s": float("nan")}, {"backoff_s_max": -0.1}],
)
def test_a_policy_that_makes_no_sense_is_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lasted_s", "code", "says"),
    [
        (61.0, StatusCode.INTERNAL, StatusCode.DEADLINE_EXCEEDED),
        # Some time is left, but not enough.
        (59.995, StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED),
        # What the server says of the request itself stays as it is.
        (61.0, StatusCode.INVALID_ARGUMENT, StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_break_after_the_calls_own_time_is_a_deadline_that_passed(
    lasted_s: float, code: StatusCode, says: StatusCode
) -> None:
    broken = Broken(own_error(code, ""), lasted_s)
    core = broken.core(RetryPolicy(backoff_s=100.0, backoff_s_max=100.0))
    with pytest.raises(grpc.RpcError) as raised:
        asyncio.run(core.generate(pb.GenerateRequest(prompt="x"), 60.0))
    assert raised.value.code() is says


@pytest.mark.parametrize("draw", [0.0, 0.999])
def test_a_call_uses_its_own_time_to_its_end(draw: float) -> None:
    """A break shortly before the deadline is a deadline that passed, not a failed call."""
    policy = RetryPolicy(backoff_s=2.0)
    for broken_s in (0.0, 3.1, 4.9, 4.98):
        attempts = Attempts(policy, 0.0, (5.0,), lambda: draw)
        now_s = broken_s
        for _ in range(policy.attempts_max - 1):
            pause_s = attempts.pause_s(LOST, now_s, reached=True)
            if pause_s is None:
                break
            now_s += pause_s
        assert attempts.is_over(now_s)
        assert 4.99 <= now_s < 5.0
