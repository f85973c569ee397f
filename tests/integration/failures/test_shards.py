"""Proves on a real Ray: two shards share the load and the replicas; a killed pool begins only its
own requests again, and replicas that come and go are spread evenly.

The replicas are fakes, so every right token is known. All kinds of failure are in `test_zz_chaos`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from protos import lockstep_pb2 as pb
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.chaos.load import all_right, fake_asks, serve, serve_during
from tests.cluster.fakes import fake_loader, load_fake_text

pytestmark = pytest.mark.ray

TOKENS = 120
STREAMS = 24


@pytest.fixture(scope="module")
def hosted() -> Iterator[HostedCluster]:
    config = cluster_config(
        replicas=2,
        pool={"shards": 2},
        scheduler={"rows_max": 4, "steps_per_batch_max": 2},
    )
    plan = Plan(config, fake_loader(step_s=0.05, prefill_s=0.05), load_fake_text)
    with HostedCluster(plan) as running:
        yield running


def spread_as(hosted: HostedCluster, *serving: int) -> pb.StatusResponse:
    """Waits until the shards have so many replicas each."""
    return hosted.wait_for(
        lambda status: [shard.serving for shard in status.shards] == list(serving)
    )


@pytest.fixture(autouse=True)
def _one_replica_each_before_and_nothing_left_after(hosted: HostedCluster) -> Iterator[None]:
    spread_as(hosted, 1, 1)
    until_both_are_known(hosted)
    yield
    spread_as(hosted, 1, 1)
    hosted.wait_until_idle()


def until_both_are_known(hosted: HostedCluster) -> None:
    """Until requests go to both: what a frontend knows of the shards is as old as a poll, and after
    a pool's death it first has to reach it again."""
    deadline_s = time.monotonic() + 60
    while True:
        outcomes = serve(hosted.address, fake_asks(8, tokens=4))
        all_right(outcomes)
        ran_on = {name for outcome in outcomes if outcome.end for name in outcome.end.replicas}
        if len(ran_on) == 2:
            return
        assert time.monotonic() < deadline_s, f"all went to {ran_on}"


def both_busy(hosted: HostedCluster) -> None:
    """Until requests run on both."""
    hosted.wait_for(lambda status: all(shard.running for shard in status.shards))
    time.sleep(0.5)


def test_a_killed_pool_loses_no_request(hosted: HostedCluster) -> None:
    def disturb() -> None:
        both_busy(hosted)
        os.kill(hosted.processes("pool")[0].pid, signal.SIGKILL)

    outcomes = serve(hosted.address, fake_asks(STREAMS, tokens=TOKENS), disturb)
    all_right(outcomes)
    recovered = sum(outcome.end.recovered > 0 for outcome in outcomes if outcome.end)
    assert 0 < recovered < STREAMS, "only those of one shard begin again"


def test_replicas_come_and_go_and_stay_evenly_spread(hosted: HostedCluster) -> None:
    def disturb() -> None:
        both_busy(hosted)
        hosted.scale(3)
        spread_as(hosted, 2, 1)
        hosted.scale(1)
        # Whichever one is left takes the rank 0, and with it the first shard.
        spread_as(hosted, 1, 0)
        hosted.scale(2)
        spread_as(hosted, 1, 1)

    outcomes = serve_during(hosted.address, fake_asks(STREAMS, tokens=TOKENS), disturb)
    all_right(outcomes)
    assert any(outcome.end is not None and outcome.end.recovered for outcome in outcomes)
