"""Proves: the pool's death costs every stream a pause, no token twice and none at all; that of an
frontend and of Serve's proxy costs the client's caller no token, character or call.

The replicas are fakes, so every right token is known without having run before. The same with a
real pair is in `test_zz_chaos`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence

import pytest

from cluster.client import RetryPolicy
from protos import lockstep_pb2 as pb
from replicas.config import ReplicaConfig
from tests.chaos.answers import cut, fake_bases
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.chaos.load import Ask, Outcome, all_right, fake_asks, serve
from tests.cluster.fakes import fake_loader, load_fake_text

pytestmark = pytest.mark.ray

SILENCE_S_MAX = 60.0
"""A machine with nothing else to do needs 2.5 s; less than `pool.unreachable_s`."""
TOKENS = 220
STREAMS = 24
LONG_TOKENS = 450
PATIENT = RetryPolicy(give_up_s=100.0, attempts_max=1000)


@pytest.fixture(scope="module")
def hosted() -> Iterator[HostedCluster]:
    # Two, so that one frontend is left when the other is killed.
    config = cluster_config(
        replicas=2, frontend={"number": 2}, scheduler={"steps_per_batch_max": 2}
    )
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


def wait_for_tokens(hosted: HostedCluster, more: int, bound_s: float = 120.0) -> None:
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


def test_a_killed_pool_silences_no_stream_for_long(hosted: HostedCluster) -> None:
    def disturb() -> None:
        hosted.wait_for_requests(STREAMS)
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
        deadline_s = time.monotonic() + 60
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


# --------------------------------------------------------------------------- frontend and proxy


def long_ask(number: int) -> Ask:
    """Twelve streams and four unary calls; every third one samples; every other one has stop
    strings that only ever begin."""
    text = load_fake_text(ReplicaConfig())
    (base,) = fake_bases([text.encode(f"héllo {'wörld ' * (number % 4)}{number}")], LONG_TOKENS)
    message = pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=base.prompt),
        max_new_tokens=LONG_TOKENS,
        ignore_eos=True,
        request_id=str(number),
    )
    if number % 3 == 0:
        message.temperature, message.seed = 1.0, number
    if number % 2:
        message.stop.extend(["e" + "never", "\ufffdnever", " never"])
    right = cut(base, text, LONG_TOKENS, ignore_eos=True, stops=message.stop)
    assert len(right.tokens) == LONG_TOKENS
    return Ask(message, right, stream=number < 12)


def test_a_killed_frontend_and_a_killed_proxy_cost_the_caller_nothing(
    hosted: HostedCluster,
) -> None:
    asks = [long_ask(number) for number in range(16)]
    killed_s = 0.0
    frontends, proxy = hosted.processes("frontend"), hosted.process("proxy")
    assert len(frontends) == 2

    def kill_both() -> None:
        nonlocal killed_s
        hosted.wait_for(lambda status: status.running == len(asks))
        wait_for_tokens(hosted, 300)
        os.kill(frontends[0].pid, signal.SIGKILL)
        time.sleep(1.0)
        killed_s = time.monotonic()
        os.kill(proxy.pid, signal.SIGKILL)

    outcomes = serve(hosted.address, asks, kill_both, PATIENT)
    all_right(outcomes)
    assert all(outcome.ended_s > killed_s for outcome in outcomes), "too late to break anything"
    for outcome in outcomes:
        assert outcome.named == 1
        assert outcome.end is not None
        assert outcome.end.usage.completion_tokens == LONG_TOKENS
        if outcome.ask.stream:
            assert outcome.end.recovered >= 1, "the proxy was every stream's"
    print(f"frontend and proxy killed: longest silence {longest_silence_s(outcomes):.2f} s")
