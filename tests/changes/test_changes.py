"""Proves: what `serve deploy` changes in the shipped configuration costs a client that never asks
twice nothing: no call is lost, none gets an answer of two models, and answers come all the time. A
change that fails, or that no node could serve, leaves what runs, and so does `lockstep serve`. With
one replica and no place for another beside it each call is answered or refused with the time to
come back; where no replica can start it is refused with the reason; and a killed frontend leaves no
bare error.

The load asks through the `openai` package where that is installed (`make test-slow` does it), else
in the same way by Python's own HTTP. Replicas have fakes, whose start takes longer than the grace.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
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
from tests.changes.fake_app import START_S
from tests.chaos.hosted import HostedCluster, Plan
from tests.chaos.http_load import PYTHON as PACKAGE, http_client
from tests.chaos.load import Outcome, all_right, fake_asks, longest_silence_s
from tests.cluster.fakes import perfect, tokenizer
from tests.free_ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
PYTHON = PACKAGE if PACKAGE.exists() else Path(sys.executable)
PROMPTS = [f"the quick {'brown ' * number}fox" for number in range(4)]
TOKENS = 48
GAP_S_MAX = 60.0
"""A machine with nothing else to do needs 2 s."""
GRACE_S = 2.0
assert GRACE_S < START_S
BOUND_S = 200.0
ASKED = {
    "model": "tiny",
    "prompt": PROMPTS,
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
}
Settings = dict[str, Any]
States = dict[str, dict[str, int]]


def right(target: str, count: int = TOKENS) -> list[str]:
    """What a target says to each prompt."""
    said = []
    for prompt in PROMPTS:
        ids = tokenizer().encode(prompt).ids
        whole = tokenizer().decode(ids + perfect(ids, count, name=target))
        said.append(whole[len(prompt) :])
    return said


@dataclass
class Load:
    """Calls while something changes."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def answered(self) -> list[dict[str, Any]]:
        return [call for call in self.calls if "text" in call]

    @property
    def lost(self) -> list[dict[str, Any]]:
        return [call for call in self.calls if "error" in call]

    def gap_s(self) -> float:
        """The longest time in which no answer ended."""
        ended = sorted(call["ended"] for call in self.answered)
        return max(later - sooner for sooner, later in pairwise(ended))

    def mixed(self, *targets: str) -> list[dict[str, Any]]:
        """Answers that none of these targets gives as a whole."""
        allowed = [right(target) for target in targets]
        return [
            call
            for call in self.answered
            if call["text"] not in {texts[call["prompt"]] for texts in allowed}
        ]


class Shipped:
    """deploy/serve.yaml on ports of this test and with fakes, and what is changed in it."""

    def __init__(self) -> None:
        data = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
        data["proxy_location"] = "HeadOnly"  # as the rig starts it
        data["http_options"]["port"], data["grpc_options"]["port"] = free_port(), free_port()
        application = data["applications"][0]
        application["import_path"] = "tests.changes.fake_app:build"
        args = application["args"]
        args["replica"] = {"target": "one", "device": "cpu"}
        args["actors"] = {"drain_s": GRACE_S, "replica_cpus": 0.05}
        args["server"] = {"served_model_name": "tiny"}
        self._data = data

    def changed(self, number: int = 2, **sections: Settings) -> dict[str, Any]:
        """The file with so many replicas, and other settings in its sections."""
        data = deepcopy(self._data)
        args = data["applications"][0]["args"]
        args["replicas"] = number
        for name, section in sections.items():
            args[name] = args.get(name, {}) | section
        return data

    def plan(self, data: dict[str, Any]) -> Plan:
        args = data["applications"][0]["args"]
        http, grpc = (data[name]["port"] for name in ("http_options", "grpc_options"))
        server = args["server"] | {"grpc_port": grpc, "http_port": http}
        return Plan(from_args(args | {"server": server}), cpus=2, declared=data)


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    return Shipped()


@pytest.fixture(scope="module")
def hosted(shipped: Shipped) -> Iterator[HostedCluster]:
    with HostedCluster(shipped.plan(shipped.changed())) as running:
        yield running


@contextmanager
def load(hosted: HostedCluster, out: Path, in_flight: int = 4) -> Iterator[Load]:
    script = ROOT / "tests" / "changes" / "openai_load.py"
    command = [PYTHON, script, f"{hosted.http}/v1", in_flight, out, json.dumps(ASKED)]

    def lines() -> int:
        return out.read_text().count("\n") if out.exists() else 0

    with subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, text=True) as process:
        seen = Load()
        try:
            until(lambda: lines() >= 2 * in_flight)
            yield seen
            before = lines()
            until(lambda: lines() >= before + 2 * in_flight)
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


def rolled(data: dict[str, Any]) -> Callable[[str, str, States], bool]:
    args = data["applications"][0]["args"]
    frontends = args["frontend"]["number"]
    wanted = {"replica": {"RUNNING": args["replicas"]}, "frontend": {"RUNNING": frontends}}
    return lambda status, _why, states: status == "RUNNING" and states == wanted


def serving(hosted: HostedCluster) -> set[int]:
    """The processes of replicas and frontends; a pool that nobody needs any more goes by itself."""
    kinds = ("replica", "frontend")
    return {process.pid for kind in kinds for process in hosted.processes(kind)}


def change(hosted: HostedCluster, data: dict[str, Any]) -> None:
    """Deploy it, and wait until nothing of what was before is left."""
    before = serving(hosted)
    hosted.declare(data)
    until(lambda: not before & {process.pid for process in hosted.processes()})
    hosted.wait_for_state(rolled(data), BOUND_S)


def test_changes_of_the_shipped_configuration_cost_no_call(
    hosted: HostedCluster, shipped: Shipped, tmp_path: Path
) -> None:
    """Of the drafter, the target, the number of replicas, that of frontends and their settings."""
    suffix: Settings = {"speculative_config": {"method": "suffix"}}
    two: Settings = {"target": "two"}
    slow: Settings = {"coalesce_ms": 30.0}
    changes = {
        "target": shipped.changed(replica=two),
        "drafter": shipped.changed(replica=two | suffix),
        "replicas": shipped.changed(1, replica=two),
        "frontends": shipped.changed(1, replica=two, frontend={"number": 1}),
        "settings of frontends": shipped.changed(1, replica=two, frontend={"number": 1} | slow),
        "frontends again": shipped.changed(1, replica=two, frontend={"number": 3}),
    }
    targets = {"target": ("one", "two")}
    for what, data in changes.items():
        with load(hosted, tmp_path / what) as seen:
            change(hosted, data)
        print(
            f"{what}: {len(seen.calls)} calls, {len(seen.lost)} lost, gap {seen.gap_s():.1f} s",
            flush=True,
        )
        assert not seen.lost, (what, seen.lost[:3])
        mixed = seen.mixed(*targets.get(what, ("two",)))
        assert not mixed, (what, mixed[:3])
        assert seen.gap_s() < GAP_S_MAX


def test_what_fails_or_cannot_be_served_leaves_what_runs(
    hosted: HostedCluster, shipped: Shipped, tmp_path: Path
) -> None:
    change(hosted, shipped.changed(1))
    before = hosted.processes("replica"), hosted.processes("frontend")
    missing = shipped.changed(1, replica={"target": "/models/none"})
    missing["applications"][0]["import_path"] = "cluster.app:build"
    with load(hosted, tmp_path / "missing") as seen:
        hosted.declare(missing)
        hosted.wait_for_state(lambda status, *_: status == "DEPLOY_FAILED", BOUND_S)
        assert "replica.target: /models/none: no such file or directory" in hosted.state()[1]
        assert (hosted.processes("replica"), hosted.processes("frontend")) == before
        hosted.declare(shipped.changed(1, replica={"target": "broken"}))
        hosted.wait_for_state(
            lambda status, why, _: status == "DEPLOY_FAILED" and "no such model" in why, BOUND_S
        )
    assert not seen.lost, seen.lost[:3]
    assert not seen.mixed("one")
    assert hosted.processes("replica") == before[0]


def test_lockstep_serve_takes_the_place_of_no_application_that_it_did_not_make(
    hosted: HostedCluster, shipped: Shipped
) -> None:
    data = shipped.changed(1)
    hosted.declare(data)
    hosted.wait_for_state(rolled(data), BOUND_S)
    before = serving(hosted)
    server = hosted.config.server
    ports = ["--http-port", server.http_port, "--grpc-port", server.grpc_port]
    command = [sys.executable, "-m", "cluster.cli.main", "serve", "tiny", "--device", "cpu", *ports]
    ran = subprocess.run(
        list(map(str, command)),
        env=os.environ | {"RAY_ADDRESS": hosted.ray_address(), "RAY_AUTH_MODE": "token"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND_S,
    )
    assert ran.returncode == 1, ran.stdout
    assert "left unchanged. --replace replaces it" in ran.stdout
    assert "Traceback" not in ran.stdout
    assert serving(hosted) == before


def test_without_a_place_for_a_second_replica_each_call_is_answered_or_told_when_to_come_back(
    hosted: HostedCluster, shipped: Shipped, tmp_path: Path
) -> None:
    """Another drafter, another target, and one that cannot be loaded."""
    alone: Settings = {"surge": False}
    change(hosted, shipped.changed(1, actors=alone))
    drafter: Settings = {"speculative_config": {"method": "suffix"}}
    for what, replica in {"drafter": drafter, "target": {"target": "two"}}.items():
        with load(hosted, tmp_path / what) as seen:
            change(hosted, shipped.changed(1, actors=alone, replica=replica))
        print(f"{what}: {len(seen.answered)} answered, {len(seen.lost)} refused")
        assert seen.lost, "there was a place"
        for call in seen.lost:
            assert call["status"] == 503 or call["status"] == "UNAVAILABLE", call
            assert call["status"] == "UNAVAILABLE" or int(call["retry_after"]) >= 1
        assert not seen.mixed("one", "two")
    with load(hosted, tmp_path / "broken") as seen:
        hosted.declare(shipped.changed(1, actors=alone, replica={"target": "broken"}))
        hosted.wait_for_state(lambda status, *_: status == "DEPLOY_FAILED", BOUND_S)
        until(lambda: "no such model" in readyz(hosted))
    assert all(call["status"] in (503, "UNAVAILABLE") for call in seen.lost), seen.lost[-3:]
    assert "no such model" in seen.lost[-1]["error"]
    # The way back.
    change(hosted, shipped.changed(1))
    with load(hosted, tmp_path / "again") as seen:
        pass
    assert not seen.lost


def readyz(hosted: HostedCluster) -> str:
    try:
        with urllib.request.urlopen(f"{hosted.http}/readyz", timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


def test_a_killed_frontend_leaves_no_bare_error(
    hosted: HostedCluster, shipped: Shipped, tmp_path: Path
) -> None:
    data = shipped.changed(1)
    hosted.declare(data)
    # Where a change has failed before, what it left is this already.
    hosted.wait_for_state(rolled(data), BOUND_S)
    with load(hosted, tmp_path / "calls", in_flight=8) as seen:
        for process in hosted.processes("frontend"):
            os.kill(process.pid, signal.SIGKILL)
        until(lambda: len(hosted.processes("frontend")) == 2)
    assert seen.lost, "nothing was hit"
    for call in seen.lost:
        assert call["status"] in (503, "UNAVAILABLE"), call


@pytest.mark.skipif(not PACKAGE.exists(), reason="make test-slow installs the openai package")
def test_streams_that_are_continued_as_the_page_says_lose_nothing(
    hosted: HostedCluster, shipped: Shipped
) -> None:
    """Both frontends are killed in the middle."""
    hosted.wait_for_state(rolled(shipped.changed(1)), BOUND_S)
    asks = fake_asks(8, tokens=300, stream=True, name="one")

    async def run() -> list[Outcome]:
        async with http_client(f"{hosted.http}/v1", "tiny", len(asks)) as client:
            assert client is not None
            asked = [asyncio.create_task(client.put(ask)) for ask in asks]
            await asyncio.to_thread(until, lambda: client.begun == len(asks))
            for frontend in hosted.processes("frontend"):
                os.kill(frontend.pid, signal.SIGKILL)
            return await asyncio.gather(*asked)

    outcomes = asyncio.run(run())
    all_right(outcomes)
    print(f"frontends killed: longest silence {longest_silence_s(outcomes):.1f} s")
