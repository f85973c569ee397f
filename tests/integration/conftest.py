"""One real cluster for all integration tests: Ray, Serve, the pool, two replicas, real gRPC.

The pair is tiny and random; the reference is transformers' own `generate` of its target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from cluster.client import Client
from cluster.frontend.target_text import TargetText
from cluster.verify import transformers_greedy
from replicas.config import ReplicaConfig
from scheduler.messages import Request
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.integration.pairs import write_pair

Expected = Callable[[list[str], int], list[list[int]]]


def plainly(replica: ReplicaConfig, prompts: Sequence[str], count: int) -> list[list[int]]:
    """New tokens by plain decoding of the whole target."""
    text = TargetText.load(replica)
    requests = [Request(prompt, text.encode(prompt), count) for prompt in prompts]
    return list(transformers_greedy(replica, requests, text.eos_token_ids))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedCluster]:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    config = cluster_config(replicas=2, target=str(target), draft=str(draft), kv_memory_mb=16)
    with HostedCluster(Plan(config, cpus=2)) as running:
        yield running


@pytest.fixture(scope="session")
def expected(cluster: HostedCluster) -> Expected:
    """New tokens by plain decoding of the target, cached by prompt and count."""
    known: dict[tuple[str, int], list[int]] = {}

    def tokens(prompts: list[str], count: int) -> list[list[int]]:
        new = [prompt for prompt in dict.fromkeys(prompts) if (prompt, count) not in known]
        for prompt, out in zip(new, plainly(cluster.config.replica, new, count), strict=True):
            known[prompt, count] = out
        return [known[prompt, count] for prompt in prompts]

    return tokens


@pytest.fixture
def client(cluster: HostedCluster) -> Iterator[Client]:
    with Client(cluster.address) as made:
        yield made
