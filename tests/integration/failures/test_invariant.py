"""Proves: on a real cluster a broken invariant ends the pool's process and Ray starts it anew; the
request that breaks it fails alone with INTERNAL after three times, and all others finish right.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from cluster.client import NO_RETRY, Client
from cluster.config import ClusterConfig
from cluster.pool import ray_pool
from protos import lockstep_pb2 as pb
from scheduler.messages import Action, Event, Submit
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.chaos.load import all_right, fake_asks, serve
from tests.cluster.fakes import fake_loader, load_fake_text

pytestmark = pytest.mark.ray

POISON = (313, 7, 313, 7)
STREAMS = 8


class PoolProcess(ray_pool.PoolProcess):
    """Its scheduler has an invariant that one prompt breaks; processes are known by their class."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        step = self.scheduler.step

        def planted(event: Event, now_s: float) -> list[Action]:
            assert not (isinstance(event, Submit) and event.request.prompt == POISON)
            return step(event, now_s)

        self.scheduler.step = planted  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def hosted() -> Iterator[HostedCluster]:
    config = cluster_config(replicas=2, scheduler={"steps_per_batch_max": 2})
    plan = Plan(config, fake_loader(0.05, 0.05), load_fake_text, pool=PoolProcess)
    with HostedCluster(plan) as running:
        yield running


def test_a_request_that_breaks_an_invariant_fails_alone(hosted: HostedCluster) -> None:
    first = hosted.process("pool").pid
    request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=POISON), max_new_tokens=20)
    told: list[grpc.RpcError] = []

    def ask() -> None:
        with (
            Client(hosted.address, retry=NO_RETRY) as client,
            pytest.raises(grpc.RpcError) as error,
        ):
            client.generate(request, timeout_s=100.0)
        told.append(error.value)

    def poison() -> None:
        hosted.wait_for_requests(STREAMS)
        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(120)

    outcomes = serve(hosted.address, fake_asks(STREAMS, tokens=220), poison)
    (error,) = told
    assert error.code() is grpc.StatusCode.INTERNAL, error.details()
    assert "it has ended the pool 3 times" in error.details()
    all_right(outcomes)
    assert hosted.process("pool").pid != first
    recovered = [outcome.end.recovered for outcome in outcomes if outcome.end]
    assert max(recovered) >= 3, recovered
    hosted.wait_until_idle()
    print("silence", max(outcome.silence_s for outcome in outcomes))
