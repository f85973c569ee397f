"""Proves: every release of the KubeRay operator from 1.5 to 1.7 brings up what the chart renders,
and makes a Service for it. The rules are from the operator's source (`operator_rules.py`)."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.cluster.kubernetes.helm import EXAMPLES, documents, render, values
from tests.cluster.kubernetes.operator_rules import (
    VERSIONS,
    Version,
    groups,
    injected_probes,
    pod_labels,
    problems,
    serve_service,
)

Service = dict[str, Any]


def ray_service(given: dict[str, Any]) -> Service:
    (service,) = (item for item in documents(render(given)) if item["kind"] == "RayService")
    return service


SERVICES = {path.stem: ray_service(values(path)) for path in EXAMPLES} | {
    "values": ray_service(values())
}

each_version = pytest.mark.parametrize("version", VERSIONS)


@each_version
@pytest.mark.parametrize("name", SERVICES)
def test_the_operator_brings_it_up_as_it_is_written(name: str, version: Version) -> None:
    assert problems(SERVICES[name], version) == []


@each_version
def test_the_service_has_http_and_from_1_6_on_grpc(version: Version) -> None:
    service = SERVICES["values"]
    made = serve_service(service, version)
    assert made is not None
    assert made["name"] == "lockstep-serve-svc"
    assert made["ports"] == {"serve": 8000} | ({"serve-grpc": 9000} if version >= (1, 6) else {})
    # Traffic goes to the workers, where the frontends are, and not to the head.
    head, workers = (pod_labels(service, group) for group in groups(service))
    assert made["selector"].items() <= workers.items()
    assert not made["selector"].items() <= head.items()


@pytest.mark.parametrize("name", SERVICES)
def test_no_probe_is_left_to_the_operator_whose_own_need_tools_in_the_image(name: str) -> None:
    for group in groups(SERVICES[name]):
        assert injected_probes(group) == []
        ports = {port["containerPort"] for port in group.ray["ports"]} | {52365}
        for probe in ("livenessProbe", "readinessProbe"):
            assert group.ray[probe]["httpGet"]["port"] in ports
    # A worker is ready when Serve's proxy on it is, as the operator has it.
    _, workers = groups(SERVICES[name])
    assert workers.ray["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": 8000}


# --------------------------------------------------------------------------- the rules themselves


def head(service: Service) -> Service:
    return service["spec"]["rayClusterConfig"]["headGroupSpec"]


def container(service: Service) -> Service:
    return head(service)["template"]["spec"]["containers"][0]


def workers(service: Service) -> Service:
    return service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]


def renamed_ports(service: Service) -> None:
    """As it was before."""
    for port in container(service)["ports"]:
        port["name"] = port["name"].replace("serve-grpc", "grpc").replace("serve", "http")


def without_dashboard(service: Service) -> None:
    container(service)["ports"] = [
        port for port in container(service)["ports"] if port["name"] != "dashboard"
    ]


BREAKS = {
    "no port named serve": renamed_ports,
    "no port named dashboard": without_dashboard,
    "metadata.name": lambda service: service["metadata"].update(name="l" * 48),
    "upgradeStrategy.type": lambda service: service["spec"]["upgradeStrategy"].update(type="X"),
    "rayClusterDeletionDelaySeconds": lambda service: service["spec"].update(
        rayClusterDeletionDelaySeconds=-1
    ),
    "has a name": lambda service: head(service).update(headService={"name": "x"}),
    "resources in rayStartParams": lambda service: head(service).update(resources={"CPU": "1"}),
    "minReplicas": lambda service: workers(service).update(minReplicas=99),
    "must be set": lambda service: workers(service).pop("maxReplicas"),
    "autoscalerOptions.version": lambda service: service["spec"]["rayClusterConfig"].pop(
        "autoscalerOptions"
    ),
    "restartPolicy": lambda service: head(service)["template"]["spec"].update(
        restartPolicy="Always"
    ),
    "has no token": lambda service: head(service)["template"]["spec"].update(
        automountServiceAccountToken=False
    ),
    "no Ray from 2.52 on": lambda service: service["spec"]["rayClusterConfig"].pop("rayVersion"),
    "REDIS_PASSWORD": lambda service: container(service).update(
        env=[{"name": "REDIS_PASSWORD", "value": "x"}]
    ),
    "startup probe": lambda service: container(service).update(startupProbe={}),
    "command of ours": lambda service: container(service).update(command=["sleep"]),
    "is the operator's": lambda service: head(service)["template"]["spec"]["volumes"].append(
        {"name": "ray-logs", "emptyDir": {}}
    ),
    "cannot write to /tmp": lambda service: container(service).pop("volumeMounts"),
}


@each_version
@pytest.mark.parametrize("said", BREAKS)
def test_each_rule_finds_what_breaks_it(said: str, version: Version) -> None:
    service = copy.deepcopy(SERVICES["operated"])
    BREAKS[said](service)
    assert any(said in problem for problem in problems(service, version)), said
