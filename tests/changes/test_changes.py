"""Proves: what `serve deploy` changes in the shipped configuration costs a client of the `openai`
package that never asks twice nothing: no call is lost, none gets an answer of two models, and
answers come all the time. With one replica that has no place for another beside it, each call is
answered or refused with the time to come back.

The load runs in the package's own environment, which `make test-slow` installs.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config_sources import from_args
from replicas.config import ReplicaConfig
from tests.chaos.hosted import HostedCluster, Plan
from tests.free_ports import free_port
from tests.integration.conftest import plainly
from tests.integration.pairs import pair_settings, write_pair

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-slow installs the openai package"),
]
PROMPTS = [f"the quick {'brown ' * number}fox" for number in range(4)]
TOKENS = 48
GAP_S_MAX = 5.0
GRACE_S = 4.0
"""Less than a replica takes to start here."""
BOUND_S = 200.0
Settings = dict[str, Any]


@dataclass
class Load:
    """Calls while something changes."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def lost(self) -> list[dict[str, Any]]:
        return [call for call in self.calls if "error" in call]

    def gap_s(self) -> float:
        """The longest time in which no answer ended."""
        ended = sorted(call["ended"] for call in self.calls if "text" in call)
        return max(later - sooner for sooner, later in pairwise(ended))


class Shipped:
    """deploy/serve.yaml on ports and a pair of this test, and what is changed in it."""

    def __init__(self, folder: Path) -> None:
        self.pairs = [write_pair(folder / "one"), write_pair(folder / "two", seed=8)]
        data = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
        data["proxy_location"] = "HeadOnly"  # as the rig starts it
        data["http_options"]["port"], data["grpc_options"]["port"] = free_port(), free_port()
        args = data["applications"][0]["args"]
        args["replica"] |= {**pair_settings(*self.pairs[0]), "device": "cpu", "torch_threads": 1}
        args["actors"] = {"drain_s": GRACE_S, "replica_cpus": 0.05}
        args["server"] = {"served_model_name": "tiny"}
        self._data = data

    def changed(self, settings: Settings = {}, **sections: Settings) -> dict[str, Any]:  # noqa: B006
        """The file with other settings, at the top or in sections."""
        data = deepcopy(self._data)
        args = data["applications"][0]["args"]
        args |= settings
        for name, section in sections.items():
            args[name] = args.get(name, {}) | section
        return data

    def plan(self, data: dict[str, Any]) -> Plan:
        args = data["applications"][0]["args"]
        http, grpc = (data[name]["port"] for name in ("http_options", "grpc_options"))
        server = args["server"] | {"grpc_port": grpc, "http_port": http}
        return Plan(from_args(args | {"server": server}), cpus=2, declared=data)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    return Shipped(tmp_path_factory.mktemp("shipped"))


@pytest.fixture(scope="module")
def right(shipped: Shipped) -> list[list[str]]:
    """The text of each prompt, by both targets."""
    from cluster.frontend.target_text import TargetText

    texts = []
    for target, draft in shipped.pairs:
        replica = ReplicaConfig(**pair_settings(target, draft), device="cpu")
        text = TargetText.load(replica)
        tokens = plainly(replica, PROMPTS, TOKENS)
        texts.append([text.tokenizer.decode(each) for each in tokens])
    return texts


@pytest.fixture(scope="module")
def hosted(shipped: Shipped) -> Iterator[HostedCluster]:
    with HostedCluster(shipped.plan(shipped.changed())) as running:
        yield running


@contextmanager
def load(hosted: HostedCluster, out: Path, in_flight: int = 4) -> Iterator[Load]:
    asked = {
        "model": "tiny",
        "prompt": PROMPTS,
        "max_tokens": TOKENS,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    script = ROOT / "tests" / "changes" / "openai_load.py"
    command = [PYTHON, script, f"{hosted.http}/v1", in_flight, out, json.dumps(asked)]
    with subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, text=True) as process:
        seen = Load()
        try:
            until(lambda: out.exists() and out.read_text().count("\n") >= 2 * in_flight)
            yield seen
            before = out.read_text().count("\n")
            until(lambda: out.read_text().count("\n") >= before + 2 * in_flight)
            assert process.stdin
            process.stdin.close()
            process.wait(BOUND_S)
        finally:
            process.kill()
    seen.calls = [json.loads(line) for line in out.read_text().splitlines()]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def rolled(replicas: int, frontends: int) -> Callable[[str, str, dict[str, dict[str, int]]], bool]:
    wanted = {"replica": {"RUNNING": replicas}, "frontend": {"RUNNING": frontends}}
    return lambda status, _why, states: status == "RUNNING" and states == wanted


def change(hosted: HostedCluster, data: dict[str, Any]) -> None:
    """Deploy it, and wait until nothing of what was before is left."""
    before = {one.pid for kind in ("replica", "frontend") for one in hosted.processes(kind)}
    args = data["applications"][0]["args"]
    hosted.declare(data)
    until(lambda: not before & {one.pid for one in hosted.processes()})
    hosted.wait_for_state(rolled(args["replicas"], args["frontend"]["number"]), BOUND_S)


@pytest.mark.parametrize("what", ["drafter", "target", "replicas", "frontends"])
def test_a_change_of_the_shipped_configuration_costs_no_call(
    what: str, hosted: HostedCluster, shipped: Shipped, right: list[list[str]], tmp_path: Path
) -> None:
    change(hosted, shipped.changed())
    target, draft = shipped.pairs[1]
    changed = {
        "drafter": shipped.changed(replica={"speculative_config": {"method": "suffix"}}),
        "target": shipped.changed(replica=pair_settings(target, draft)),
        "replicas": shipped.changed({"replicas": 3}),
        "frontends": shipped.changed(frontend={"number": 3}),
    }[what]
    with load(hosted, tmp_path / "calls") as seen:
        change(hosted, changed)
    print(f"{what}: {len(seen.calls)} calls, {len(seen.lost)} lost, gap {seen.gap_s():.1f} s")
    assert not seen.lost, seen.lost[:3]
    allowed = [right[0], right[1 if what == "target" else 0]]
    mixed = [
        call for call in seen.calls if call["text"] not in {a[call["prompt"]] for a in allowed}
    ]
    assert not mixed, mixed[:3]
    assert seen.gap_s() < GAP_S_MAX
    last = max(seen.calls, key=lambda call: call["begun"])
    assert last["text"] == allowed[1][last["prompt"]]


def test_what_no_node_could_serve_leaves_all_as_it_is(
    hosted: HostedCluster, shipped: Shipped, tmp_path: Path
) -> None:
    change(hosted, shipped.changed())
    before = hosted.processes("replica"), hosted.processes("frontend")
    with load(hosted, tmp_path / "calls") as seen:
        hosted.declare(shipped.changed(replica={"target": "/models/none"}))
        hosted.wait_for_state(lambda status, *_: status == "DEPLOY_FAILED", BOUND_S)
        assert "replica.target: /models/none: no such file or directory" in hosted.state()[1]
    assert not seen.lost, seen.lost[:3]
    assert (hosted.processes("replica"), hosted.processes("frontend")) == before


@pytest.mark.parametrize("what", ["drafter", "target"])
def test_without_a_place_for_a_second_replica_calls_are_answered_or_told_when_to_come_back(
    what: str, hosted: HostedCluster, shipped: Shipped, right: list[list[str]], tmp_path: Path
) -> None:
    alone: Settings = {"actors": {"surge": False, "drain_s": GRACE_S, "replica_cpus": 0.05}}
    target, draft = shipped.pairs[1]
    models = pair_settings(target, draft)
    if what == "drafter":
        models = {"speculative_config": {"method": "suffix"}}
    change(hosted, shipped.changed({"replicas": 1, **alone}))
    with load(hosted, tmp_path / "calls") as seen:
        change(hosted, shipped.changed({"replicas": 1, **alone}, replica=models))
    answered = [call for call in seen.calls if "text" in call]
    print(f"{what}: {len(answered)} answered, {len(seen.lost)} refused, gap {seen.gap_s():.1f} s")
    for call in seen.lost:
        assert call["status"] == 503, call
        assert int(call["retry_after"]) >= 1
        assert call["ended"] - call["begun"] < GRACE_S + 2, call
    assert seen.lost, "there was a place"
    allowed = [right[0], right[1 if what == "target" else 0]]
    assert all(call["text"] in {a[call["prompt"]] for a in allowed} for call in answered)
