"""Proves: a setting of every section that is given in the chart's values reaches the application
once, over what the chart computes, and the settings accept it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from cluster.config import ClusterConfig
from tests.cluster.kubernetes.helm import RenderError, documents, overlaid, render, values
from tests.cluster.kubernetes.rendered import config_of, ray_service

GIVEN: dict[str, Any] = {
    "seed": 7,
    "autoscaling": {"tokens_per_s": 700.0},
    "replica": {"deterministic": False, "speculative_config": {"method": "eagle3"}},
    "scheduler": {"rows_max": 16},
    "pool": {"unreachable_s": 600.0},
    "frontend": {"number": 3},
    "server": {"served_model_name": "chat", "log_format": "json"},
    "auth": {"keys_file": "/etc/lockstep/others.yaml"},
    "actors": {"surge": False, "drain_s": 60.0},
    "audit": {"share": 0.01},
    "trace": {"endpoint": "http://collector:4318/v1/traces"},
}
FIXED = {"pods": {"min": 2, "max": 2}}


class _NothingTwice(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(set(keys)) == len(keys), keys
        return super().construct_mapping(node, deep)


def service(changed: dict[str, Any]) -> dict[str, Any]:
    return ray_service(documents(render(overlaid(values(), changed))))


def serve_config(changed: dict[str, Any]) -> dict[str, Any]:
    text = service(changed)["spec"]["serveConfigV2"]
    read: dict[str, Any] = yaml.load(text, _NothingTwice)
    return read


def test_a_setting_of_every_section_reaches_the_application_once() -> None:
    # `replicas` has a value of its own, `pods`.
    assert GIVEN.keys() == ClusterConfig.model_fields.keys() - {"replicas"}
    args = serve_config({"settings": GIVEN})["applications"][0]["args"]
    computed = serve_config({})["applications"][0]["args"]
    assert args == overlaid(computed, GIVEN)
    assert computed.keys() < args.keys()
    config = config_of(service({"settings": GIVEN}))
    assert config.seed == 7
    assert config.autoscaling is not None
    assert (config.autoscaling.tokens_per_s, config.replicas_max) == (700.0, 8)
    assert config.model_name == "chat"
    # The head is where the Job puts the draft.
    draft = config_of(service({})).replica.drafting.model
    assert (config.replica.drafting.method, config.replica.drafting.model) == ("eagle3", draft)


def test_answers_are_the_same_after_a_failure_unless_a_setting_says_otherwise() -> None:
    assert config_of(service({})).replica.deterministic
    given = {"settings": {"replica": {"deterministic": False}}}
    assert not config_of(service(given)).replica.deterministic


def test_a_fixed_number_of_replicas_refuses_autoscaling() -> None:
    assert config_of(service(FIXED)).replicas == 2
    with pytest.raises(
        RenderError, match=r"settings\.autoscaling: needs pods\.max above pods\.min"
    ):
        service(FIXED | {"settings": {"autoscaling": {"drain_s": 5}}})


def test_serves_own_logs_have_a_value() -> None:
    given = {"serveLogging": {"encoding": "JSON"}}
    logging = serve_config(given)["logging_config"]
    assert logging == {"enable_access_log": False, "encoding": "JSON"}
