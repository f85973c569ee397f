"""Proves on a real Ray that replicas come and go by load, and that no request notices.

Fake replicas, whose right tokens can be computed; every answer is compared token by token, over
plain gRPC without a client library that would repeat a call.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random

import grpc.aio
import pytest

from cluster.config import ClusterConfig, from_args
from protos import lockstep_pb2 as pb
from protos import lockstep_pb2_grpc
from tests.cluster.fakes import VOCAB, perfect
from tests.free_ports import free_port
from tests.integration.elastic import ANSWER_S, ElasticCluster

pytestmark = pytest.mark.ray

STEP_S = 0.02
BOUND_S = 180.0
"""For any wait; a busy machine starts processes slowly."""
PORTS = {"grpc_port": free_port(), "http_port": free_port()}
POOL = {"name": "elastic"}


def fixed(replicas: int, torch_threads: int = 1) -> ClusterConfig:
    return from_args({"replicas": replicas, "torch_threads": torch_threads, "pool": POOL, **PORTS})


ELASTIC = from_args(
    {
        "autoscaling": {
            "min_replicas": 0,
            "max_replicas": 3,
            "drain_s": 3.0,
            "up_delay_s": 0.5,
            "down_delay_s": 1.0,
            # Longer than this machine may stand still between an answer and a look at the cluster.
            "idle_s": 8.0,
            "tokens_per_s": 1000.0,
            "look_s": 0.2,
        },
        "torch_threads": 1,
        "pool": POOL,
        **PORTS,
    }
)


@pytest.fixture(scope="module")
def elastic() -> Iterator[ElasticCluster]:
    started = ElasticCluster(fixed(1), STEP_S)
    try:
        yield started
    finally:
        started.stop()


def request_of(rng: Random, tokens: int) -> pb.GenerateRequest:
    prompt = [rng.randrange(2, VOCAB) for _ in range(rng.choice([3, 17, 60]))]
    return pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=prompt), max_new_tokens=tokens, ignore_eos=True
    )


def right(request: pb.GenerateRequest) -> list[int]:
    return perfect(list(request.prompt_token_ids.ids), request.max_new_tokens)


async def ask(
    stub: lockstep_pb2_grpc.LockstepStub, request: pb.GenerateRequest, stream: bool
) -> tuple[bool, int]:
    """(whether the tokens are right, how often the sequence began again); raises on any error."""
    if not stream:
        response = await stub.Generate(request, timeout=ANSWER_S)
        tokens, end = list(response.token_ids), response.end
    else:
        tokens, end = [], pb.End()
        async for chunk in stub.GenerateStream(request, timeout=ANSWER_S):
            tokens.extend(chunk.token_ids)
            end = chunk.end
    return tokens == right(request), end.recovered


def under_load(
    address: str,
    callers: int,
    disturb: Callable[[], None],
    lengths: Sequence[int] = (20, 90, 180),
) -> tuple[int, int]:
    """(requests, of which began again), all right, asked by so many callers while `disturb` runs.

    Any error or wrong token of any caller fails the test.
    """
    over = threading.Event()
    seen: list[tuple[bool, int]] = []

    async def caller(stub: lockstep_pb2_grpc.LockstepStub, number: int) -> None:
        rng = Random(number)
        while not over.is_set():
            request = request_of(rng, rng.choice(lengths))
            seen.append(await ask(stub, request, stream=number % 2 == 0))

    async def load() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = lockstep_pb2_grpc.LockstepStub(channel)
            await asyncio.gather(*(caller(stub, number) for number in range(callers)))

    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(load())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        disturb()
    finally:
        over.set()
        thread.join(ANSWER_S)
    assert not thread.is_alive()
    assert not failures, failures[0]
    assert all(good for good, _ in seen)
    return len(seen), sum(recovered > 0 for _, recovered in seen)


def test_replicas_come_with_the_load_from_none_and_go_with_it(elastic: ElasticCluster) -> None:
    elastic.deploy(ELASTIC)
    elastic.wait_for(0, BOUND_S)
    assert not elastic.healthy(), "no replica has its models in memory"

    request = request_of(Random(1), 40)
    began_s = time.monotonic()
    assert list(elastic.generate(request).token_ids) == right(request)
    print(f"the first request from nothing took {time.monotonic() - began_s:.1f} s")
    assert elastic.healthy()

    def grow() -> None:
        elastic.wait_for(3, BOUND_S)

    requests, _ = under_load(elastic.address, 60, grow, lengths=(300,))
    assert requests >= 60
    took_s = elastic.wait_for(0, BOUND_S)
    print(f"from the last answer to no replica: {took_s:.1f} s")


def test_twenty_scale_downs_under_load_lose_nothing(elastic: ElasticCluster) -> None:
    elastic.deploy(fixed(4))
    elastic.wait_for(4, BOUND_S)
    downs = 0

    def breathe() -> None:
        nonlocal downs
        for wave in range(7):
            if wave:
                elastic.scale(4)
                elastic.wait_for(4, BOUND_S)
            for number in (3, 2, 1):
                elastic.scale(number)
                elastic.wait_for(number, BOUND_S)
                downs += 1

    began_s = time.monotonic()
    requests, again = under_load(elastic.address, 32, breathe)
    took_s = time.monotonic() - began_s
    print(f"{downs} scale-downs in {took_s:.1f} s: {requests} requests, {again} of them moved")
    assert downs >= 20
    assert again > 0, "no replica that went had anything to hand back"


def test_a_rolling_update_under_load_loses_nothing(elastic: ElasticCluster) -> None:
    elastic.deploy(fixed(2))
    elastic.wait_for(2, BOUND_S)
    before = {replica.id for replica in elastic.status().replicas}
    incarnation = elastic.status().pool_incarnation

    def update() -> None:
        time.sleep(1)
        elastic.deploy(fixed(2, torch_threads=2))
        elastic.wait_for(2, BOUND_S)
        time.sleep(1)

    requests, again = under_load(elastic.address, 16, update)
    print(f"rolling update: {requests} requests, {again} of them moved")
    status = elastic.status()
    assert not before & {replica.id for replica in status.replicas}, "a replica was not replaced"
    assert status.pool_incarnation == incarnation, "the new replicas are in another pool"
