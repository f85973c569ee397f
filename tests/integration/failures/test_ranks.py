"""Proves: the ranks of one replica, on two nodes of a real Ray, serve what the whole target says,
whatever drafts and whichever rank is killed.

Two worker nodes have a GPU each in Ray's books, and the placement group asks for one per rank, so
the ranks are on different nodes. They compute on the CPU and talk gloo.
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

from benchmarks.shared.processes import Process, lives
from cluster.client import Client
from protos import lockstep_pb2 as pb
from replicas.config import ReplicaConfig
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.integration.conftest import plainly
from tests.integration.pairs import write_pair
from tests.replicas.heads import said, save_head

pytestmark = pytest.mark.ray

PROMPTS = [f"the quick {'brown ' * (n % 5)}fox number {n}" for n in range(12)]
TOKENS = 200


def load_in_turn(config: ReplicaConfig, directory: Path) -> Any:
    """Each replica that starts drafts in another way; a file named by its process says how."""
    from cluster import app

    head = str(directory / "head")
    ways = (
        {"method": "suffix"},
        {"method": "eagle3", "model": head},
        {"method": "draft_model", "model": config.draft},
    )
    way = ways[len(list(directory.glob("pid-*"))) % len(ways)]
    (directory / f"pid-{os.getpid()}").write_text(way["method"])
    given = config.model_dump() | {"draft": None, "speculative": way}
    return app.load_replica(ReplicaConfig(**given))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def hosted(directory: Path) -> Iterator[HostedCluster]:
    target, draft = write_pair(directory, positions=1024)
    save_head(directory / "head", AutoConfig.from_pretrained(target), said(True))
    config = cluster_config(
        target=str(target),
        draft=str(draft),
        kv_memory_mb=16,
        replica={"tensor_parallel": 2, "calibrate": False},
        actors={"replica_gpus": 1.0, "ranks_strategy": "PACK"},
    )
    load = partial(load_in_turn, directory=directory)
    with HostedCluster(Plan(config, load, worker_nodes=2)) as running:
        yield running


@pytest.fixture(scope="module")
def right(hosted: HostedCluster) -> list[list[int]]:
    """What plain decoding of the whole target gives."""
    return plainly(hosted.config.replica, PROMPTS, TOKENS)


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


def test_ranks_on_two_nodes_give_the_tokens_of_the_whole_target(
    hosted: HostedCluster, right: list[list[int]]
) -> None:
    first, second = ranks(hosted)
    assert first.node_id != second.node_id
    assert served(hosted) == right
    assert ranks(hosted) == (first, second)


def kill_one(hosted: HostedCluster, right: list[list[int]], lost: int) -> None:
    hosted.wait_for_replicas(1)
    before = ranks(hosted)
    seen = hosted.wait_for(lambda _status: True)
    answers: list[list[list[int]]] = []
    load = threading.Thread(target=lambda: answers.append(served(hosted)), daemon=True)
    load.start()
    hosted.wait_for(lambda status: status.tokens_committed > seen.tokens_committed)
    os.kill(before[lost].pid, signal.SIGKILL)
    load.join(240)
    assert answers == [right]
    after = hosted.wait_for_replicas(1)
    assert after.recovered > seen.recovered, "nothing ran when the rank was killed"
    deadline_s = time.monotonic() + 60
    while any(lives(process.pid) for process in before):
        assert time.monotonic() < deadline_s, "a rank of the broken replica lives on"
        time.sleep(0.1)
    # Ray may take a moment to see it.
    while set(hosted.processes("replica") + hosted.processes("rank")) & set(before):
        assert time.monotonic() < deadline_s, "Ray still knows a rank that has ended"
        time.sleep(0.1)
    assert served(hosted) == right


def test_a_rank_that_is_killed_has_the_replica_replaced_and_no_request_fails(
    hosted: HostedCluster, right: list[list[int]], directory: Path
) -> None:
    for lost, way in ((0, "suffix"), (1, "eagle3")):
        (replica, _) = ranks(hosted)
        assert (directory / f"pid-{replica.pid}").read_text() == way
        kill_one(hosted, right, lost)
