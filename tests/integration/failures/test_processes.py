"""Proves on one real cluster: whatever process dies, hangs, comes or goes, every request ends once,
with the tokens of an undisturbed run, and none twice; what breaks the cluster fails alone; and
replicas come and go by load, one by one or all at an update.

The replicas are fakes with processes of their own, so every right token is known without having run
before. The same with a real pair is in `test_zz_chaos`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.client import NO_RETRY, Client, RetryPolicy
from cluster.config import ClusterConfig
from cluster.pool import ray_pool
from protos import lockstep_pb2 as pb
from scheduler.messages import Action, Event, Submit
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.chaos.load import all_right, fake_asks, longest_silence_s, recovered, serve
from tests.chaos.troubled import HANG_ONCE, KILL_IN_PREFILL, POISON, struck, troubled_loader
from tests.cluster.fakes import load_fake_text
from tests.free_ports import free_port

pytestmark = pytest.mark.ray

SILENCE_S_MAX = 60.0
"""A machine with nothing else to do needs 2.5 s; less than `pool.unreachable_s`."""
TOKENS = 220
STREAMS = 24
LONG_TOKENS = 450
BATCH_S_MAX = 4.0
BOUND_S = 180.0
"""For any wait; a busy machine starts processes slowly."""
PATIENT = RetryPolicy(give_up_s=100.0, attempts_max=1000)
BREAKS_AN_INVARIANT = (313, 7, 313, 7)
PORTS = {"grpc_port": free_port(), "http_port": free_port()}
AUTOSCALING = {
    "min_replicas": 0,
    "max_replicas": 3,
    "drain_s": 3.0,
    "up_delay_s": 0.5,
    "down_delay_s": 1.0,
    "idle_s": 2.0,
    "tokens_per_s": 1000.0,
}


class PoolProcess(ray_pool.PoolProcess):
    """Its scheduler has an invariant that one prompt breaks; processes are known by their class."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        step = self.scheduler.step

        def planted(event: Event, now_s: float) -> list[Action]:
            broken = isinstance(event, Submit) and event.request.prompt == BREAKS_AN_INVARIANT
            assert not broken
            return step(event, now_s)

        self.scheduler.step = planted  # type: ignore[method-assign]


def settings(**more: Any) -> ClusterConfig:
    """Two frontends, so that one is left when the other is killed."""
    return cluster_config(
        frontend={"number": 2},
        actors={"batch_s_max": BATCH_S_MAX, "drain_s": 10.0},
        # Not by measured times: streams must last until they are disturbed.
        scheduler={"steps_per_batch_max": 2, "draft_len": 2},
        ports=PORTS,
        **more,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("troubles")


@pytest.fixture(scope="module")
def hosted(directory: Path) -> Iterator[HostedCluster]:
    load = troubled_loader(directory, step_s=0.05)
    with HostedCluster(Plan(settings(replicas=2), load, load_fake_text, pool=PoolProcess)) as made:
        yield made


@pytest.fixture
def _two_replicas_before_and_nothing_left_after(hosted: HostedCluster) -> Iterator[None]:
    hosted.wait_for_replicas(2)
    yield
    hosted.wait_for_replicas(2)
    hosted.wait_until_idle()


TWO = pytest.mark.usefixtures("_two_replicas_before_and_nothing_left_after")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# --------------------------------------------------------------------------- replicas


@TWO
def test_a_replica_killed_in_a_prefill_and_one_that_hangs_are_replaced_and_cost_no_token(
    hosted: HostedCluster, directory: Path
) -> None:
    asks = fake_asks(1, first=KILL_IN_PREFILL) + fake_asks(3, first=HANG_ONCE) + fake_asks(8)
    outcomes = serve(hosted.address, asks)
    all_right(outcomes)
    assert len(struck(directory, KILL_IN_PREFILL)) == 1
    longest_s = max(outcome.total_s for outcome in outcomes)
    print(f"replica hung (batch_s_max {BATCH_S_MAX} s): all answered after {longest_s:.2f} s")
    assert longest_s > BATCH_S_MAX, "it did not hang"
    (hung,) = struck(directory, HANG_ONCE)
    deadline_s = time.monotonic() + 60
    while any(process.pid == hung for process in hosted.processes("replica")):
        assert time.monotonic() < deadline_s, "the process was not replaced"
        time.sleep(0.1)


@TWO
def test_a_request_that_kills_replicas_fails_after_three_and_harms_no_other(
    hosted: HostedCluster, directory: Path
) -> None:
    (poison,) = fake_asks(1, first=POISON)
    poisoned, *others = serve(hosted.address, [poison, *fake_asks(12, tokens=200)])
    all_right(others)
    assert poisoned.code is grpc.StatusCode.INTERNAL, poisoned.sentence()
    assert poisoned.end is not None
    assert poisoned.end.finish_reason == pb.FINISH_REASON_FAILED
    assert "died" in poisoned.details, "the client is not told why"
    killed = len(struck(directory, POISON))
    print(f"poisonous request: {killed} replicas killed, failed after {poisoned.total_s:.1f} s")
    assert 1 <= killed <= 3


# --------------------------------------------------------------------------- the pool


@TWO
def test_a_killed_pool_and_a_request_that_breaks_an_invariant_silence_no_stream_for_long(
    hosted: HostedCluster,
) -> None:
    """The pool is killed together with a replica. The request ends it as soon as it is back, three
    times in a row, and fails alone."""
    first = hosted.process("pool").pid
    prompt = pb.TokenIds(ids=BREAKS_AN_INVARIANT)
    request = pb.GenerateRequest(prompt_token_ids=prompt, max_new_tokens=20)
    told: list[grpc.RpcError] = []

    def ask() -> None:
        with (
            Client(hosted.address, retry=NO_RETRY) as client,
            pytest.raises(grpc.RpcError) as error,
        ):
            client.generate(request, timeout_s=100.0)
        told.append(error.value)

    def disturb() -> None:
        hosted.wait_for_requests(STREAMS)
        hosted.wait_for_tokens(400)
        for victim in (hosted.processes("replica")[0], hosted.process("pool")):
            kill(victim.pid)
        hosted.wait_for_tokens(300)
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(120)

    outcomes = serve(hosted.address, fake_asks(STREAMS, tokens=TOKENS), disturb)
    (error,) = told
    assert error.code() is grpc.StatusCode.INTERNAL, error.details()
    assert "it has ended the pool 3 times" in error.details()
    all_right(outcomes)
    assert hosted.process("pool").pid != first
    assert min(recovered(outcomes)) >= 1
    assert max(recovered(outcomes)) >= 4
    print(f"pool killed, ended three times: silence {longest_silence_s(outcomes):.2f} s")
    # A new replica's start takes CPU from the new pool's.
    assert longest_silence_s(outcomes) < 2 * SILENCE_S_MAX


# --------------------------------------------------------------------------- frontend and proxy


@TWO
def test_a_killed_frontend_and_a_killed_proxy_cost_the_caller_nothing(
    hosted: HostedCluster,
) -> None:
    asks = fake_asks(16, tokens=LONG_TOKENS)
    for ask in asks[:8]:
        # Each begins in the text, so that a part of it is held back where it breaks.
        ask.message.stop.extend(["e" + "never", "\ufffdnever", " never"])
    killed_s = 0.0
    frontends, proxy = hosted.processes("frontend"), hosted.process("proxy")
    assert len(frontends) == 2

    def kill_both() -> None:
        nonlocal killed_s
        hosted.wait_for(lambda status: status.running == len(asks))
        hosted.wait_for_tokens(300)
        kill(frontends[0].pid)
        time.sleep(1.0)
        killed_s = time.monotonic()
        kill(proxy.pid)

    outcomes = serve(hosted.address, asks, kill_both, PATIENT)
    all_right(outcomes)
    assert all(outcome.ended_s > killed_s for outcome in outcomes), "too late to break anything"
    for outcome in outcomes:
        assert outcome.end is not None
        assert outcome.end.usage.completion_tokens == LONG_TOKENS
        if outcome.ask.stream:
            assert outcome.end.recovered >= 1, "the proxy was every stream's"
    print(f"frontend and proxy killed: longest silence {longest_silence_s(outcomes):.2f} s")


# --------------------------------------------------------------------------- elasticity


def test_replicas_that_go_and_a_rolling_update_under_load_lose_nothing(
    hosted: HostedCluster,
) -> None:
    hosted.wait_for_replicas(2)
    before: list[pb.StatusResponse] = []

    def breathe_and_update() -> None:
        hosted.scale(1)
        before[:] = [hosted.wait_for_replicas(1, BOUND_S)]
        hosted.deploy(settings(replicas=2, replica={"torch_threads": 2}))
        hosted.wait_for_replicas(2, BOUND_S)

    # Streams and unary calls of three lengths.
    asks = [ask for tokens in (20, 90, 180) for ask in fake_asks(8, tokens=tokens)]
    outcomes = serve(hosted.address, asks, breathe_and_update, again=True)
    all_right(outcomes)
    assert max(recovered(outcomes)) > 0, "no replica that went had anything to hand back"
    after = hosted.wait_for_replicas(2, BOUND_S)
    old = {replica.id for replica in before[0].replicas}
    assert not old & {replica.id for replica in after.replicas}, "a replica was not replaced"
    assert after.pool_incarnation == before[0].pool_incarnation, "they are in another pool"


def test_replicas_come_with_the_load_from_none_and_go_with_it(hosted: HostedCluster) -> None:
    hosted.deploy(settings(autoscaling=AUTOSCALING))
    hosted.wait_for_replicas(0, BOUND_S)
    with Client(hosted.address, retry=NO_RETRY) as client:
        assert not client.ready(), "no replica has its models in memory"

    def grow() -> None:
        hosted.wait_for_replicas(3, BOUND_S)

    all_right(serve(hosted.address, fake_asks(60, tokens=300), grow, again=True))
    hosted.wait_for_replicas(0, BOUND_S)


# --------------------------------------------------------------------------- shards


def test_of_two_shards_a_killed_pool_begins_only_its_own_requests_again(
    hosted: HostedCluster,
) -> None:
    """Runs last: the pool of the other settings lives on beside theirs."""
    others = hosted.processes("pool")
    hosted.deploy(settings(replicas=2, pool={"shards": 2}))
    hosted.wait_for(lambda status: [shard.serving for shard in status.shards] == [1, 1], BOUND_S)
    deadline_s = time.monotonic() + 60
    ran_on: set[str] = set()
    # What a frontend knows of the shards is as old as a poll.
    while len(ran_on) < 2:
        assert time.monotonic() < deadline_s, f"all went to {ran_on}"
        outcomes = serve(hosted.address, fake_asks(8, tokens=4))
        all_right(outcomes)
        ran_on = {name for outcome in outcomes if outcome.end for name in outcome.end.replicas}

    def disturb() -> None:
        hosted.wait_for(lambda status: all(shard.running for shard in status.shards))
        hosted.wait_for_tokens(200)
        kill(next(process.pid for process in hosted.processes("pool") if process not in others))

    outcomes = serve(hosted.address, fake_asks(STREAMS, tokens=TOKENS), disturb)
    all_right(outcomes)
    assert 0 < sum(map(bool, recovered(outcomes))) < STREAMS, "those of one shard begin again"
    hosted.wait_until_idle()
