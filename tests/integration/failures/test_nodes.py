"""Proves: losing a whole node, with replicas or with the pool on it, loses no request and no token.

Several Ray nodes run on this machine; Serve's proxy and the frontend are on the head node, which
stays. All processes of a node that is lost are killed at once, without a word to the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from benchmarks.shared.processes import KINDS, lives
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.chaos.load import Outcome, all_right, fake_asks, serve
from tests.cluster.fakes import fake_loader, load_fake_text

pytestmark = pytest.mark.ray

STREAMS = 24
TOKENS = 220


@pytest.fixture(scope="module")
def hosted() -> Iterator[HostedCluster]:
    """A head node with proxy and frontend, two more with a replica each, on one of them the pool.

    The frontend asks for more CPUs than a worker has, the replicas for a GPU, which in Ray's books
    the workers have and the head has not.
    """
    config = cluster_config(
        replicas=2,
        actors={"replica_gpus": 1.0, "frontend_cpus": 3.0},
        scheduler={"steps_per_batch_max": 2},
    )
    plan = Plan(
        config,
        fake_loader(step_s=0.05, prefill_s=0.05),
        load_fake_text,
        worker_nodes=2,
        pool_on_worker=True,
    )
    with HostedCluster(plan) as running:
        yield running


def lose_while_streams_run(hosted: HostedCluster, node_id: str) -> list[Outcome]:
    """Also asserts that what ran on the node is dead."""
    there = [one.pid for kind in KINDS for one in hosted.processes(kind) if one.node_id == node_id]
    assert there

    before = hosted.wait_for(lambda _status: True).tokens_committed

    def lose() -> None:
        hosted.wait_for_requests(STREAMS)
        hosted.wait_for(lambda status: status.tokens_committed > before + 600)
        hosted.lose_node(node_id)

    outcomes = serve(hosted.address, fake_asks(STREAMS, tokens=TOKENS), lose)
    deadline_s = time.monotonic() + 30
    while left := [pid for pid in there if lives(pid)]:
        assert time.monotonic() < deadline_s, f"{left} live on"
        time.sleep(0.1)
    return outcomes


def longest_silence_s(outcomes: list[Outcome]) -> float:
    return max(outcome.silence_s for outcome in outcomes)


def test_a_node_with_a_replica_is_lost(hosted: HostedCluster) -> None:
    head = hosted.process("frontend").node_id
    pool = hosted.process("pool").node_id
    nodes = {process.node_id for process in hosted.processes("replica")}
    assert len(nodes) == 2
    assert head not in nodes
    gone = next(node for node in nodes if node != pool)
    outcomes = lose_while_streams_run(hosted, gone)
    all_right(outcomes)
    assert any(outcome.end and outcome.end.recovered for outcome in outcomes)
    assert hosted.process("pool").node_id == pool
    print(f"node with a replica lost: silence {longest_silence_s(outcomes):.2f} s")
    # The lease ends that. Ray itself believes in the node for 15 s.
    assert longest_silence_s(outcomes) < 15
    hosted.add_node()
    hosted.wait_for_replicas(2, 240.0)
    all_right(serve(hosted.address, fake_asks(8)))
    hosted.wait_until_idle()


def test_the_node_with_the_pool_is_lost(hosted: HostedCluster) -> None:
    hosted.wait_for_replicas(2)
    gone = hosted.process("pool").node_id
    assert gone != hosted.process("frontend").node_id
    assert gone in {process.node_id for process in hosted.processes("replica")}
    outcomes = lose_while_streams_run(hosted, gone)
    all_right(outcomes)
    assert all(outcome.end and outcome.end.recovered for outcome in outcomes)
    assert hosted.process("pool").node_id != gone
    print(f"node with the pool lost: silence {longest_silence_s(outcomes):.2f} s")
    hosted.wait_until_idle()
