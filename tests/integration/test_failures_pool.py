"""Proves: the pool's death costs every stream a pause below 5 s, no token twice and none at all.

The replicas are fakes, so every right token is known without having run before. The same with a
real pair is in `test_zz_failures`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.chaos.load import Outcome, all_right, fake_asks, serve
from tests.cluster.fakes import fake_loader, load_fake_text

pytestmark = pytest.mark.ray

SILENCE_S_MAX = 5.0
TOKENS = 220
STREAMS = 24


@pytest.fixture(scope="module")
def hosted() -> Iterator[HostedCluster]:
    config = cluster_config(replicas=2, scheduler={"steps_per_order_max": 2})
    plan = Plan(config, fake_loader(step_s=0.05, prefill_s=0.05), load_fake_text)
    with HostedCluster(plan) as running:
        yield running


@pytest.fixture(autouse=True)
def _two_replicas_before_and_nothing_left_after(hosted: HostedCluster) -> Iterator[None]:
    hosted.wait_for_replicas(2)
    yield
    hosted.wait_for_replicas(2)
    hosted.wait_until_idle()


def kill_pool(hosted: HostedCluster) -> None:
    os.kill(hosted.process("pool").pid, signal.SIGKILL)


def wait_for_tokens(hosted: HostedCluster, more: int, bound_s: float = 30.0) -> None:
    """Until the pool, whichever incarnation, has committed so many tokens from now on."""
    start = hosted.wait_for(lambda _status: True, bound_s)
    hosted.wait_for(
        lambda status: (
            status.pool_incarnation == start.pool_incarnation
            and status.tokens_committed > start.tokens_committed + more
        ),
        bound_s,
    )


def longest_silence_s(outcomes: Sequence[Outcome]) -> float:
    return max(outcome.silence_s for outcome in outcomes)


def test_a_killed_pool_silences_no_stream_for_5_s(hosted: HostedCluster) -> None:
    def disturb() -> None:
        wait_for_tokens(hosted, 400)
        kill_pool(hosted)

    outcomes = serve(hosted.address, fake_asks(STREAMS, tokens=TOKENS), disturb)
    all_right(outcomes)
    assert all(outcome.end is not None and outcome.end.recovered for outcome in outcomes)
    print(f"pool killed: longest silence {longest_silence_s(outcomes):.2f} s")
    assert longest_silence_s(outcomes) < SILENCE_S_MAX


def test_a_pool_killed_again_as_soon_as_it_is_back(hosted: HostedCluster) -> None:
    def disturb() -> None:
        wait_for_tokens(hosted, 400)
        first = hosted.process("pool").pid
        os.kill(first, signal.SIGKILL)
        deadline_s = time.monotonic() + 30
        while (again := hosted.process("pool").pid) == first:
            assert time.monotonic() < deadline_s
        os.kill(again, signal.SIGKILL)

    outcomes = serve(hosted.address, fake_asks(STREAMS, tokens=TOKENS), disturb)
    all_right(outcomes)
    print(f"pool killed while it came back: silence {longest_silence_s(outcomes):.2f} s")
    # Two restarts may lie within one silence.
    assert longest_silence_s(outcomes) < 2 * SILENCE_S_MAX


def test_a_pool_killed_twice_while_the_same_streams_run(hosted: HostedCluster) -> None:
    def disturb() -> None:
        for _ in range(2):
            wait_for_tokens(hosted, 300)
            kill_pool(hosted)
            time.sleep(0.5)

    outcomes = serve(hosted.address, fake_asks(STREAMS, tokens=TOKENS), disturb)
    all_right(outcomes)
    print(f"pool killed twice: longest silence {longest_silence_s(outcomes):.2f} s")
    assert longest_silence_s(outcomes) < SILENCE_S_MAX
    assert max(outcome.end.recovered for outcome in outcomes if outcome.end) >= 2


def test_pool_and_replica_killed_at_once(hosted: HostedCluster) -> None:
    def disturb() -> None:
        wait_for_tokens(hosted, 400)
        victims = [hosted.processes("replica")[0].pid, hosted.process("pool").pid]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    outcomes = serve(hosted.address, fake_asks(STREAMS, tokens=TOKENS), disturb)
    all_right(outcomes)
    print(f"pool and replica killed: longest silence {longest_silence_s(outcomes):.2f} s")
    # The new replica's start takes CPU from the new pool's.
    assert longest_silence_s(outcomes) < 2 * SILENCE_S_MAX


def test_a_pool_killed_while_idle_serves_the_next_request(hosted: HostedCluster) -> None:
    kill_pool(hosted)
    began_s = time.monotonic()
    all_right(serve(hosted.address, fake_asks(6, tokens=20)))
    print(f"pool killed while idle: all answered after {time.monotonic() - began_s:.2f} s")
    assert time.monotonic() - began_s < SILENCE_S_MAX
