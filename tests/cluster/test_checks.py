"""Proves: what no machine could serve is refused before anything starts, with a sentence that names
the setting; nodes are asked where replicas may run, and one that has what is needed is enough.
"""

from __future__ import annotations

from typing import Any

import pytest
import ray

from cluster import checks
from cluster.checks import check_on_nodes, check_pair
from cluster.config import ClusterConfig, ConfigError
from cluster.config_sources import from_args
from tests.integration.pairs import pair_settings, write_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return {**pair_settings(target, draft), "device": "cpu"}


def test_a_pair_that_fits_has_nothing_to_be_said_of(pair: dict[str, Any]) -> None:
    check_pair(from_args({"replica": pair}))


NONE = {"method": "draft_model", "model": "/models/none"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"target": "/models/none"}, "replica.target: /models/none: no such file or directory"),
        ({"speculative_config": NONE}, "speculative_config.model: /models/none: no such file"),
        ({"context_len": 100_000}, "context_len: 100000 is over the target's own limit"),
        ({"num_gpu_blocks_override": None, "memory": "2MiB"}, "least"),
        # A whole model is no head.
        (
            {"speculative_config": {"method": "eagle3", "model": "TARGET"}},
            "only one layer is served",
        ),
    ],
)
def test_what_does_not_fit_is_refused_without_its_weights(
    wrong: dict[str, Any], said: str, pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.models.loader.load_model", None)
    given = {**pair, **wrong}
    drafting = given["speculative_config"]
    if drafting["model"] == "TARGET":
        given["speculative_config"] = {**drafting, "model": pair["target"]}
    with pytest.raises(ConfigError, match=said):
        check_pair(from_args({"replica": given}))


def test_a_file_of_keys_that_cannot_be_read_is_named(pair: dict[str, Any]) -> None:
    config = from_args({"replica": pair, "auth": {"keys_file": "/models/none"}})
    with pytest.raises(ConfigError, match=r"auth\.keys_file: .*No such file or directory"):
        check_pair(config)


# --------------------------------------------------------------------------- nodes


class Nodes:
    """A Ray whose nodes say this of the settings; None: a node does not answer."""

    def __init__(self, patch: pytest.MonkeyPatch, problems: dict[str, str | None]) -> None:
        self.asked: list[str] = []
        self._problems = problems
        self.resources: dict[str, dict[str, float]] = {}
        patch.setattr(checks, "NodeAffinitySchedulingStrategy", lambda node, soft: node)
        patch.setattr(ray, "nodes", self._nodes)
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr(ray, "cluster_resources", dict)
        patch.setattr(ray, "remote", lambda _function: self)
        patch.setattr(ray, "wait", self._wait)
        patch.setattr(ray, "get", lambda node: problems[node])
        patch.setattr(ray, "cancel", lambda node, force: None)

    def _nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "Alive": True, "Resources": self.resources.get(node, {"CPU": 1.0})}
            for node in self._problems
        ]

    def options(self, scheduling_strategy: str, **_options: Any) -> Nodes:
        self.asked.append(scheduling_strategy)
        return self

    def remote(self, _config: ClusterConfig) -> str:
        return self.asked[-1]

    def _wait(self, waiting: list[str], timeout: float) -> tuple[list[str], list[str]]:
        done = [node for node in waiting if self._problems[node] is not None][:1]
        return done, [node for node in waiting if node not in done]


@pytest.mark.parametrize(
    ("problems", "refused"),
    [
        ({"a": "target: /x: no such file"}, True),
        ({"a": "target: /x: no such file", "b": ""}, False),
        ({"a": "target: /x: no such file", "b": None}, False),
        ({"a": None}, False),
        ({}, False),
    ],
)
def test_settings_are_refused_where_every_node_that_answers_refuses_them(
    problems: dict[str, str | None], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Nodes(monkeypatch, problems)
    if refused:
        with pytest.raises(ConfigError, match="target: /x: no such file"):
            check_on_nodes(from_args({}))
    else:
        check_on_nodes(from_args({}))


def test_only_nodes_that_could_hold_a_replica_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(monkeypatch, {"head": "no models here", "worker": ""})
    nodes.resources = {"head": {"CPU": 8.0}, "worker": {"CPU": 4.0, "GPU": 1.0}}
    check_on_nodes(from_args({"replica": {"device": "cuda"}}))
    assert nodes.asked == ["worker"]
