"""Proves on a real Ray that replicas come and go by load, and that no request notices.

The replicas are fakes, so every right token is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from cluster.client import NO_RETRY, Client
from cluster.config import ClusterConfig
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.chaos.load import Ask, Outcome, all_right, fake_asks, serve, serve_during
from tests.cluster.fakes import fake_loader, load_fake_text
from tests.free_ports import free_port

pytestmark = pytest.mark.ray

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
    "look_s": 0.2,
}


def fixed(replicas: int, torch_threads: int = 1) -> ClusterConfig:
    return cluster_config(replicas=replicas, torch_threads=torch_threads, **PORTS)


@pytest.fixture(scope="module")
def hosted() -> Iterator[HostedCluster]:
    with HostedCluster(Plan(fixed(1), fake_loader(0.02), load_fake_text)) as running:
        yield running


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
    hosted.deploy(cluster_config(autoscaling=AUTOSCALING, **PORTS))
    hosted.wait_for_replicas(0, BOUND_S)
    with Client(hosted.address, retry=NO_RETRY) as client:
        assert not client.ready(), "no replica has its models in memory"
        all_right(serve(hosted.address, fake_asks(1, tokens=40)))
        assert client.ready()
    moved(hosted, fake_asks(60, tokens=300), lambda: _grown_to(hosted, 3))
    hosted.wait_for_replicas(0, BOUND_S)


def _grown_to(hosted: HostedCluster, count: int) -> None:
    hosted.wait_for_replicas(count, BOUND_S)


def test_scale_downs_under_load_lose_nothing(hosted: HostedCluster) -> None:
    hosted.deploy(fixed(4))
    hosted.wait_for_replicas(4, BOUND_S)

    def breathe() -> None:
        for number in (3, 2, 1, 4) * 3:
            hosted.scale(number)
            hosted.wait_for_replicas(number, BOUND_S)

    again = moved(hosted, mixed_asks(33), breathe)
    assert again > 0, "no replica that went had anything to hand back"


def test_a_rolling_update_under_load_loses_nothing(hosted: HostedCluster) -> None:
    hosted.deploy(fixed(2))
    before = hosted.wait_for_replicas(2, BOUND_S)

    def update() -> None:
        time.sleep(1)
        hosted.deploy(fixed(2, torch_threads=2))
        hosted.wait_for_replicas(2, BOUND_S)
        time.sleep(1)

    moved(hosted, mixed_asks(18), update)
    after = hosted.wait_for_replicas(2, BOUND_S)
    old = {replica.id for replica in before.replicas}
    assert not old & {replica.id for replica in after.replicas}, "a replica was not replaced"
    assert after.pool_incarnation == before.pool_incarnation, "they are in another pool"
