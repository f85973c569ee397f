"""Proves: losing a whole node, with replicas or with the pool on it, loses no request and no token;
the ranks of one replica on two nodes serve what the whole target says, whatever drafts and when
a rank is killed.

Several Ray nodes run on this machine; Serve's proxy and the frontend are on the head node, which
stays. Two worker nodes have a GPU each in Ray's books. All processes of a node that is lost are
killed at once, without a word to the others. Ranks compute on the CPU and talk gloo.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.shared.processes import KINDS, Process, lives
from cluster.client import Client
from protos import lockstep_pb2 as pb
from replicas.config import ReplicaConfig
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.chaos.load import all_right, fake_asks, longest_silence_s, recovered, serve
from tests.cluster.fakes import load_fake, load_fake_text
from tests.free_ports import free_port
from tests.integration.conftest import plainly
from tests.integration.pairs import pair_settings, write_pair
from tests.replicas.heads import said, save_head

pytestmark = pytest.mark.ray

STREAMS = 24
TOKENS = 220
SILENCE_S_MAX = 120.0
"""4 s, and 7 to 11 s for the pool's node: Ray believes in it for 5 s, and the actor
starts anew."""
PORTS = {"grpc_port": free_port(), "http_port": free_port()}


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
        ports=PORTS,
    )
    plan = Plan(
        config,
        partial(load_fake, step_s=0.05, prefill_s=0.05),
        load_fake_text,
        worker_nodes=2,
        pool_on_worker=True,
    )
    with HostedCluster(plan) as running:
        yield running


def lose(hosted: HostedCluster, node_id: str) -> None:
    """Under load; returns when what ran on the node is dead."""
    there = [
        process.pid
        for kind in KINDS
        for process in hosted.processes(kind)
        if process.node_id == node_id
    ]
    assert there
    hosted.wait_for_tokens(400)
    hosted.lose_node(node_id)
    deadline_s = time.monotonic() + 30
    while left := [pid for pid in there if lives(pid)]:
        assert time.monotonic() < deadline_s, f"{left} live on"
        time.sleep(0.1)


def test_a_node_with_a_replica_and_then_the_node_with_the_pool_are_lost(
    hosted: HostedCluster,
) -> None:
    times_s: list[float] = []

    def disturb() -> None:
        pool = hosted.process("pool").node_id
        nodes = {process.node_id for process in hosted.processes("replica")}
        assert len(nodes) == 2
        assert pool in nodes
        assert hosted.process("frontend").node_id not in nodes
        (other,) = nodes - {pool}
        lose(hosted, other)
        hosted.wait_for(lambda status: len(status.replicas) == 1)
        times_s.append(time.monotonic())
        hosted.add_node()
        hosted.wait_for_replicas(2, 240.0)
        # Until what the loss met has ended: the new replica may be there before that.
        hosted.wait_for_tokens(STREAMS * TOKENS)
        assert hosted.process("pool").node_id == pool
        times_s.append(time.monotonic())
        lose(hosted, pool)
        times_s.append(time.monotonic())
        hosted.wait_for_tokens(0)
        assert hosted.process("pool").node_id != pool

    asks = fake_asks(STREAMS, tokens=TOKENS)
    outcomes = serve(hosted.address, asks, disturb, again=True)
    all_right(outcomes)
    healed_s, begun_s, lost_s = times_s
    first = [outcome for outcome in outcomes if outcome.ended_s < begun_s]
    second = [
        outcome
        for outcome in outcomes
        if healed_s < outcome.began_s < begun_s and outcome.ended_s > lost_s
    ]
    for through in (first, second):
        print(f"a node lost: longest silence {longest_silence_s(through):.2f} s")
        assert max(recovered(through)) > 0
        assert longest_silence_s(through) < SILENCE_S_MAX
    hosted.wait_until_idle()
    hosted.add_node()


# --------------------------------------------------------------------------- ranks

PROMPTS = [f"the quick {'brown ' * (n % 5)}fox number {n}" for n in range(12)]


def load_in_turn(config: ReplicaConfig, directory: Path) -> Any:
    """Each replica that starts drafts in another way; a file named by its process says how."""
    from cluster import app

    ways = ({"method": "suffix"}, {"method": "eagle3", "model": str(directory / "head")})
    way = ways[len(list(directory.glob("pid-*"))) % len(ways)]
    (directory / f"pid-{os.getpid()}").write_text(way["method"])
    given = config.model_dump() | {"speculative_config": way}
    return app.load_replica(ReplicaConfig(**given))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def right(hosted: HostedCluster, directory: Path) -> list[list[int]]:
    """What plain decoding of the whole target gives; two ranks of it are served from now on."""
    target, draft = write_pair(directory, positions=1024)
    save_head(directory / "head", AutoConfig.from_pretrained(target), said(True))
    config = cluster_config(
        replica={**pair_settings(target, draft), "tensor_parallel": 2, "calibrate": False},
        actors={"replica_gpus": 1.0, "ranks_strategy": "PACK"},
        ports=PORTS,
    )
    hosted.become(Plan(config, partial(load_in_turn, directory=directory)))
    return plainly(config.replica, PROMPTS, TOKENS)


def ranks(hosted: HostedCluster) -> tuple[Process, Process]:
    """Those of the replica: its own process, and the other one."""
    return hosted.process("replica"), hosted.process("rank")


def served(hosted: HostedCluster) -> list[list[int]]:
    def tokens(prompt: str) -> list[int]:
        with Client(hosted.address) as client:
            message = pb.GenerateRequest(prompt=prompt, max_new_tokens=TOKENS)
            return list(client.generate(message).token_ids)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(tokens, PROMPTS))


def test_ranks_on_two_nodes_give_the_tokens_of_the_whole_target_though_one_is_killed(
    hosted: HostedCluster, right: list[list[int]], directory: Path
) -> None:
    """The rank beside the replica's own process. The replica that comes drafts in another way."""
    before = first, second = ranks(hosted)
    assert first.node_id != second.node_id
    seen = hosted.wait_for(lambda _status: True)
    answers: list[list[list[int]]] = []
    load = threading.Thread(target=lambda: answers.append(served(hosted)), daemon=True)
    load.start()
    hosted.wait_for_tokens(0)
    os.kill(second.pid, signal.SIGKILL)
    load.join(240)
    assert answers == [right]
    after = hosted.wait_for_replicas(1)
    assert after.recovered > seen.recovered, "nothing ran when the rank was killed"
    deadline_s = time.monotonic() + 60
    while any(lives(process.pid) for process in before):
        assert time.monotonic() < deadline_s, "a rank of the broken replica lives on"
        time.sleep(0.1)
    assert served(hosted) == right
    ways = [(directory / f"pid-{process.pid}").read_text() for process in (first, ranks(hosted)[0])]
    assert ways == ["suffix", "eagle3"]
