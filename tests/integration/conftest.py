"""One real cluster for all integration tests: Ray, Serve, the pool, two replicas, real gRPC; and a
server with keys: the real command, in a process and a Ray of its own.

The pairs are tiny and random; the reference is transformers' own `generate` of the target.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.client import Client
from cluster.frontend.admission.keys import add
from cluster.frontend.target_text import TargetText
from cluster.verify import transformers_greedy
from replicas.config import ReplicaConfig
from scheduler.messages import Request
from tests.chaos.hosted import HostedCluster, Plan, cluster_config
from tests.free_ports import free_port
from tests.integration.pairs import pair_flags, pair_settings, write_pair
from tests.serving import lockstep_serve

STREAM_TOKENS = 2000
"""Of a long stream: more than a second on a machine that takes 0.2 ms for a step."""
Expected = Callable[[list[str], int], list[list[int]]]


def plainly(replica: ReplicaConfig, prompts: Sequence[str], count: int) -> list[list[int]]:
    """New tokens by plain decoding of the whole target."""
    text = TargetText.load(replica)
    requests = [Request(prompt, text.encode(prompt), count) for prompt in prompts]
    return list(transformers_greedy(replica, requests, text.eos_token_ids))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedCluster]:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    config = cluster_config(replica=pair_settings(target, draft), replicas=2)
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


# --------------------------------------------------------------------------- the command, with keys


def other_address() -> str | None:
    """An address of this machine that is not loopback, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if address.startswith("127.") else address


@dataclass(frozen=True)
class Keyed:
    """A server with keys that listens to every address of this machine."""

    process: subprocess.Popen[bytes]
    log: Path
    grpc_port: int
    http_port: int
    alice: str
    """No limits."""
    dave: str
    """50 tokens per minute. For one test only, which would wait until they are there again."""

    @property
    def target(self) -> str:
        return f"{other_address() or '127.0.0.1'}:{self.grpc_port}"

    @property
    def http(self) -> str:
        return f"http://{other_address() or '127.0.0.1'}:{self.http_port}"


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    target, draft = write_pair(folder / "pair", positions=STREAM_TOKENS + 48)
    keys_file, log = folder / "keys.yaml", folder / "log"
    alice, dave = add(keys_file, "alice"), add(keys_file, "dave", tokens_per_minute=50)
    grpc_port, http_port = free_port(), free_port()
    arguments = [
        *("--device", "cpu", *pair_flags(target, draft, blocks=5500)),
        *("--grpc-port", str(grpc_port), "--http-port", str(http_port), "--torch-threads", "1"),
        *("--http-host", "0.0.0.0", "--keys-file", str(keys_file)),
        *("--served-model-name", "tiny", "--actors-config", '{"drain_s": 300}'),
    ]
    with lockstep_serve(arguments, log) as process:
        yield Keyed(process, log, grpc_port, http_port, alice, dave)
