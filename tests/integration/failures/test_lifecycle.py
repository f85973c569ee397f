"""Proves: the pool's death costs every stream a pause, no token twice and none at all; that of a
frontend and of Serve's proxy costs the client's caller no token, character or call; replicas come
and go by load, one by one or all at an update, and no request notices.

The replicas are fakes, so every right token is known without having run before. The same with a
real pair is in `test_zz_chaos`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from cluster.client import NO_RETRY, Client, RetryPolicy
from cluster.config import ClusterConfig
from protos import lockstep_pb2 as pb
from replicas.config import ReplicaConfig
from tests.chaos.answers import cut, fake_bases
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.chaos.load import Ask, Outcome, all_right, fake_asks, serve, serve_during
from tests.cluster.fakes import fake_loader, load_fake_text
from tests.free_ports import free_port

pytestmark = pytest.mark.ray

SILENCE_S_MAX = 60.0
"""A machine with nothing else to do needs 2.5 s; less than `pool.unreachable_s`."""
TOKENS = 220
STREAMS = 24
LONG_TOKENS = 450
PATIENT = RetryPolicy(give_up_s=100.0, attempts_max=1000)


BOUND_S = 180.0
"""For any wait; a busy machine starts processes slowly."""
PORTS = {"grpc_port": free_port(), "http_port": free_port()}
AUTOSCALING = {
    "min_replicas": 0,
    "max_replicas": 3,
    "drain_s": 3.0,
    "up_delay_s": 0.5,
    "down_delay_s": 1.0,
    # Longer than this machine may stand still between an answer and a look at the cluster.
    "idle_s": 8.0,
    "tokens_per_s": 1000.0,
}


def settings(**more: Any) -> ClusterConfig:
    """Two frontends, so that one is left when the other is killed."""
    return cluster_config(
        frontend={"number": 2}, scheduler={"steps_per_batch_max": 2}, **PORTS, **more
    )


@pytest.fixture(scope="module")
def hosted() -> Iterator[HostedCluster]:
    plan = Plan(settings(replicas=2), fake_loader(step_s=0.05, prefill_s=0.05), load_fake_text)
    with HostedCluster(plan) as running:
        yield running


@pytest.fixture
def _two_replicas_before_and_nothing_left_after(hosted: HostedCluster) -> Iterator[None]:
    hosted.wait_for_replicas(2)
    yield
    hosted.wait_for_replicas(2)
    hosted.wait_until_idle()


TWO = pytest.mark.usefixtures("_two_replicas_before_and_nothing_left_after")


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


@TWO
@pytest.mark.parametrize(
    ("kinds", "silence_s_max"),
    # A new replica's start takes CPU from the new pool's.
    [(["pool"], SILENCE_S_MAX), (["replica", "pool"], 2 * SILENCE_S_MAX)],
)
def test_a_killed_pool_silences_no_stream_for_long(
    hosted: HostedCluster, kinds: list[str], silence_s_max: float
) -> None:
    def disturb() -> None:
        hosted.wait_for_requests(STREAMS)
        wait_for_tokens(hosted, 400)
        victims = [hosted.processes(kind)[0].pid for kind in kinds]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    outcomes = serve(hosted.address, fake_asks(STREAMS, tokens=TOKENS), disturb)
    all_right(outcomes)
    assert all(outcome.end is not None and outcome.end.recovered for outcome in outcomes)
    print(f"{kinds} killed: longest silence {longest_silence_s(outcomes):.2f} s")
    assert longest_silence_s(outcomes) < silence_s_max


@TWO
def test_a_pool_killed_once_more_and_as_soon_as_it_is_back(hosted: HostedCluster) -> None:
    def disturb() -> None:
        wait_for_tokens(hosted, 300)
        kill_pool(hosted)
        time.sleep(0.5)
        wait_for_tokens(hosted, 300)
        first = hosted.process("pool").pid
        os.kill(first, signal.SIGKILL)
        deadline_s = time.monotonic() + 60
        while (again := hosted.process("pool").pid) == first:
            assert time.monotonic() < deadline_s
        os.kill(again, signal.SIGKILL)

    outcomes = serve(hosted.address, fake_asks(STREAMS, tokens=TOKENS), disturb)
    all_right(outcomes)
    print(f"pool killed three times: longest silence {longest_silence_s(outcomes):.2f} s")
    # Two restarts may lie within one silence.
    assert longest_silence_s(outcomes) < 2 * SILENCE_S_MAX
    assert max(outcome.end.recovered for outcome in outcomes if outcome.end) >= 2


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


@TWO
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
        assert outcome.end.usage.completion_tokens == LONG_TOKENS
        if outcome.ask.stream:
            assert outcome.end.recovered >= 1, "the proxy was every stream's"
    print(f"frontend and proxy killed: longest silence {longest_silence_s(outcomes):.2f} s")


# --------------------------------------------------------------------------- elasticity


def mixed_asks(count: int) -> list[Ask]:
    """Streams and unary calls of three lengths."""
    return [ask for tokens in (20, 90, 180) for ask in fake_asks(count // 3, tokens=tokens)]


def moved(hosted: HostedCluster, asks: list[Ask], disturb: Callable[[], None]) -> int:
    """How many requests began again, of all those that were put while `disturb` ran."""
    began_s = time.monotonic()
    outcomes: list[Outcome] = serve_during(hosted.address, asks, disturb)
    all_right(outcomes)
    again = sum(outcome.end is not None and outcome.end.recovered > 0 for outcome in outcomes)
    took_s = time.monotonic() - began_s
    print(f"{len(outcomes)} requests in {took_s:.1f} s, {again} of them moved")
    return again


def test_replicas_come_with_the_load_from_none_and_go_with_it(hosted: HostedCluster) -> None:
    hosted.deploy(settings(autoscaling=AUTOSCALING))
    hosted.wait_for_replicas(0, BOUND_S)
    with Client(hosted.address, retry=NO_RETRY) as client:
        assert not client.ready(), "no replica has its models in memory"
        all_right(serve(hosted.address, fake_asks(1, tokens=40)))
        assert client.ready()

    def grow() -> None:
        hosted.wait_for_replicas(3, BOUND_S)

    moved(hosted, fake_asks(60, tokens=300), grow)
    hosted.wait_for_replicas(0, BOUND_S)


def test_scale_downs_under_load_lose_nothing(hosted: HostedCluster) -> None:
    hosted.deploy(settings(replicas=4))
    hosted.wait_for_replicas(4, BOUND_S)

    def breathe() -> None:
        for number in (3, 2, 1, 4) * 3:
            hosted.scale(number)
            hosted.wait_for_replicas(number, BOUND_S)

    again = moved(hosted, mixed_asks(33), breathe)
    assert again > 0, "no replica that went had anything to hand back"


def test_a_rolling_update_under_load_loses_nothing(hosted: HostedCluster) -> None:
    hosted.deploy(settings(replicas=2))
    before = hosted.wait_for_replicas(2, BOUND_S)

    def update() -> None:
        time.sleep(1)
        hosted.deploy(settings(replicas=2, torch_threads=2))
        hosted.wait_for_replicas(2, BOUND_S)
        time.sleep(1)

    moved(hosted, mixed_asks(18), update)
    after = hosted.wait_for_replicas(2, BOUND_S)
    old = {replica.id for replica in before.replicas}
    assert not old & {replica.id for replica in after.replicas}, "a replica was not replaced"
    assert after.pool_incarnation == before.pool_incarnation, "they are in another pool"
