"""Proves: deploy/kuberay.yaml is what the chart renders, the schema of its values refuses what
cannot work, and Kubernetes and the operator's CRD take all that it renders."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from cluster.config import ClusterConfig
from tests.cluster.kubernetes.helm import (
    CHART,
    DEPLOY,
    EXAMPLES,
    HEADER,
    KUBERAY,
    RELEASE,
    documents,
    overlaid,
    render,
    values,
)
from tests.cluster.kubernetes.rendered import CASES, Rendered, pod_specs, ray_service, redis

RAY_SERVICE = yaml.safe_load((Path(__file__).parent / "rayservice.schema.yaml").read_text())
KUBERNETES = ("1.30", "1.37")
OF_OTHERS = {"RayService", "PodMonitor"}
"""Kinds that are not Kubernetes' own."""


# --------------------------------------------------------------------------- one source


def test_the_file_for_those_without_helm_is_what_the_chart_renders() -> None:
    made_anew = "python -m tests.cluster.kubernetes.helm"
    assert KUBERAY.read_text() == HEADER + render(values()), made_anew


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda path: path and path.stem)
def test_helm_renders_the_same(example: Path | None) -> None:
    chosen = ["-f", str(example)] if example else []
    command = ["helm", "template", RELEASE, str(CHART), *chosen]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def by_name(rendered: Rendered) -> dict[tuple[str, str], Any]:
        return {(item["kind"], item["metadata"]["name"]): item for item in rendered}

    ours = documents(render(values(example) if example else values()))
    assert by_name(documents(printed)) == by_name(ours)


def test_versions_are_the_projects() -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]
    pins = (DEPLOY.parent / "constraints.txt").read_text().splitlines()
    assert f"ray=={values()['image']['rayVersion']}" in pins


# --------------------------------------------------------------------------- schemas


def strict(given: Any) -> list[str]:
    schema = json.loads((CHART / "values.schema.json").read_text())
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(given)]


@pytest.mark.parametrize("case", CASES)
def test_the_schema_of_the_values_takes_what_we_show(case: str) -> None:
    assert strict(CASES[case]) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"pod": {"min": 2}},  # a key that is none
        {"pods": {"min": 0}},  # the frontends need a pod
        {"image": {"digest": "latest"}},
        {"auth": {"keysSecret": ""}},
        {"upgradeStrategy": "Recreate"},
        {"models": {"target": "x; curl evil"}},  # it goes into a command
        {"requestSecondsMax": 60},
        {"settings": {"sheduler": {}}},
        # What another value says already.
        {"settings": {"replicas": 2}},
        {"settings": {"autoscaling": {"max_replicas": 2}}},
        {"settings": {"autoscaling": {"min_replicas": 2}}},
        {"settings": {"replica": {"tensor_parallel": 2}}},
        {"settings": {"scheduler": {"timeout_s_max": 60}}},
        {"settings": {"seed": 1 << 54}},  # Helm would round it
    ],
)
def test_the_schema_of_the_values_refuses_what_cannot_work(wrong: dict[str, Any]) -> None:
    assert strict(overlaid(values(), wrong)) != []


def test_the_schema_names_every_value_and_no_other() -> None:
    def keys(schema: dict[str, Any], given: Any, at: str) -> None:
        named = schema.get("properties")
        if at == "values.settings":
            assert schema["properties"].keys() == ClusterConfig.model_fields.keys()
        elif named is not None:
            assert given.keys() == named.keys() - {"global"}, at
            for key, value in given.items():
                keys(named[key], value, f"{at}.{key}")

    keys(json.loads((CHART / "values.schema.json").read_text()), values(), "values")


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_resource_and_every_pod(rendered: Rendered, version: str) -> None:
    for document in rendered + redis():
        if document["kind"] not in OF_OTHERS:
            kubernetes_validate.validate(document, version, strict=True)
    for name, spec in pod_specs(rendered).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        kubernetes_validate.validate(pod, version, strict=True)


def test_the_crd_takes_the_ray_service(rendered: Rendered) -> None:
    jsonschema.Draft7Validator(RAY_SERVICE).validate(ray_service(rendered))


def test_names_of_resources_differ(rendered: Rendered) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered + redis()]
    assert len(set(names)) == len(names)
