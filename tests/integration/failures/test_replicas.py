"""Proves: whatever becomes of a replica, every request ends once, with the tokens of a perfect run.

Replicas are fakes with real processes, so that a test can strike at the right moment and knows
every right token without having run before.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence

import grpc
import pytest

from protos import lockstep_pb2 as pb
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.chaos.load import Outcome, all_right, fake_asks, serve, serve_during
from tests.chaos.troubled import HANG_ONCE, POISON, SLOW_PREFILL, SLOW_STEP, Stage, troubled_loader
from tests.cluster.fakes import load_fake_text

pytestmark = pytest.mark.ray

BATCH_S_MAX = 4.0


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("stage"))


@pytest.fixture(scope="module")
def hosted(stage: Stage) -> Iterator[HostedCluster]:
    config = cluster_config(
        replicas=2,
        batch_size=4,
        actors={"batch_s_max": BATCH_S_MAX, "drain_s": 10.0},
        scheduler={"steps_per_batch_max": 2},
    )
    plan = Plan(config, troubled_loader(stage.directory, slow_s=0.3), load_fake_text)
    with HostedCluster(plan) as running:
        yield running


@pytest.fixture(autouse=True)
def _two_replicas_before_and_nothing_left_after(hosted: HostedCluster) -> Iterator[None]:
    hosted.wait_for_replicas(2)
    yield
    hosted.wait_until_idle()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def until_replaced(hosted: HostedCluster, pid: int) -> None:
    deadline_s = time.monotonic() + 60
    while any(process.pid == pid for process in hosted.processes("replica")):
        assert time.monotonic() < deadline_s, "the process was not replaced"
        time.sleep(0.1)


def recovered(outcomes: Sequence[Outcome]) -> int:
    return max(outcome.end.recovered for outcome in outcomes if outcome.end is not None)


def test_a_replica_killed_in_a_prefill(hosted: HostedCluster, stage: Stage) -> None:
    slow = fake_asks(3, first=SLOW_PREFILL, tokens=12)
    outcomes = serve_during(
        hosted.address,
        slow + fake_asks(8),
        lambda: kill(stage.wait_for("prefill", SLOW_PREFILL).pid),
    )
    all_right(outcomes)
    assert recovered(outcomes) >= 1


def test_the_same_sequence_loses_two_replicas_in_a_row(hosted: HostedCluster, stage: Stage) -> None:
    def kill_twice() -> None:
        first = stage.wait_for("speculate", SLOW_STEP).pid
        kill(first)
        kill(stage.wait_for("speculate", SLOW_STEP, other_than=first).pid)

    outcomes = serve(hosted.address, fake_asks(1, first=SLOW_STEP, tokens=16), kill_twice)
    all_right(outcomes)
    assert recovered(outcomes) >= 2


def test_a_replica_that_hangs_is_replaced_and_its_requests_finish_elsewhere(
    hosted: HostedCluster, stage: Stage
) -> None:
    hung: list[int] = []
    outcomes = serve(
        hosted.address,
        fake_asks(3, first=HANG_ONCE) + fake_asks(8),
        lambda: hung.append(stage.wait_for("speculate", HANG_ONCE).pid),
    )
    all_right(outcomes)
    longest_s = max(outcome.total_s for outcome in outcomes)
    print(f"replica hung (batch_s_max {BATCH_S_MAX} s): all answered after {longest_s:.2f} s")
    assert longest_s > BATCH_S_MAX, "it did not hang"
    until_replaced(hosted, hung[0])


def test_a_request_that_kills_replicas_fails_after_three_and_harms_no_other(
    hosted: HostedCluster, stage: Stage
) -> None:
    before = stage.count("killed")
    (poison,) = fake_asks(1, first=POISON)
    innocent = fake_asks(12, tokens=200)
    poisoned, *others = serve(hosted.address, [poison, *innocent])
    all_right(others)
    assert poisoned.code is grpc.StatusCode.INTERNAL, poisoned.sentence()
    assert poisoned.end.finish_reason == pb.FINISH_REASON_FAILED
    assert poisoned.named == 1
    assert "died" in poisoned.details, "the client is not told why"
    killed = stage.count("killed") - before
    print(f"poisonous request: {killed} replicas killed, failed after {poisoned.total_s:.1f} s")
    assert 1 <= killed <= 3
