"""Proves: frontends are spread over nodes; and a node that gets a notice, as a spot machine does,
is empty before its time is over, while no client, each of which asks only once, loses anything.

Three Ray nodes run on this machine, two of them with a GPU in Ray's books and a replica, which is a
fake; each has a frontend.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest

from benchmarks.shared.processes import KINDS
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.chaos.load import all_right, fake_asks, longest_silence_s, serve
from tests.cluster.fakes import load_fake, load_fake_text

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NOTICE_S = 100.0
"""A machine with nothing else to do is empty after 10 s."""
NODES = 3


@pytest.fixture(scope="module")
def hosted() -> Iterator[HostedCluster]:
    config = cluster_config(
        replicas=2, frontend={"number": NODES}, actors={"replica_gpus": 1.0, "drain_s": 10.0}
    )
    load = partial(load_fake, step_s=0.02, prefill_s=0.02)
    with HostedCluster(Plan(config, load, load_fake_text, worker_nodes=NODES - 1)) as running:
        yield running


def on(hosted: HostedCluster, node_id: str) -> list[str]:
    """The kinds of what runs on a node and serves requests."""
    found = (process for kind in KINDS for process in hosted.processes(kind))
    return [process.kind for process in found if process.node_id == node_id]


def test_frontends_are_spread_over_the_nodes(hosted: HostedCluster) -> None:
    frontends = hosted.processes("frontend")
    assert len({process.node_id for process in frontends}) == len(frontends) == NODES


def test_a_node_with_a_notice_is_empty_in_time_and_no_call_is_lost(hosted: HostedCluster) -> None:
    """Another node takes what ran on it."""
    hosted.add_node()
    leaving = hosted.processes("replica")[0].node_id

    def give_notice() -> None:
        hosted.wait_for_tokens(400)
        assert {"replica", "frontend"} <= set(on(hosted, leaving))
        begun_s = time.monotonic()
        hosted.drain_node(leaving, NOTICE_S)
        while {"replica", "frontend"} & set(on(hosted, leaving)):
            assert time.monotonic() - begun_s < NOTICE_S, on(hosted, leaving)
            time.sleep(0.2)
        print(f"empty {time.monotonic() - begun_s:.1f} s after the notice")
        hosted.lose_node(leaving)
        hosted.wait_for_tokens(400)

    outcomes = serve(hosted.address, fake_asks(24, tokens=150), give_notice, again=True)
    all_right(outcomes)
    print(f"{len(outcomes)} calls, longest silence {longest_silence_s(outcomes):.1f} s")
    hosted.wait_for_replicas(2)
