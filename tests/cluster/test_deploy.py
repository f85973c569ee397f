"""Proves: what stands in deploy/ parses, and names only what the code has."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import ClusterConfig
from cluster.config_sources import from_args, from_file
from cluster.metrics import METRICS
from cluster.run import ray_environment

DEPLOY = Path(__file__).parents[2] / "deploy"


def serve_configs() -> Iterator[Any]:
    yield pytest.param(yaml.safe_load((DEPLOY / "serve.yaml").read_text()), id="serve.yaml")
    ray_service = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    yield pytest.param(yaml.safe_load(ray_service["spec"]["serveConfigV2"]), id="kuberay.yaml")


@pytest.mark.parametrize("data", serve_configs())
def test_serve_accepts_the_config_and_so_do_we(data: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    from cluster.app import SERVICER_FUNCTIONS

    ServeDeploySchema.model_validate(data)
    assert tuple(data["grpc_options"]["grpc_servicer_functions"]) == SERVICER_FUNCTIONS
    for path in [app["import_path"].replace(":", ".") for app in data["applications"]] + list(
        SERVICER_FUNCTIONS
    ):
        module, name = path.rsplit(".", 1)
        assert callable(getattr(import_module(module), name))
    from_args(data["applications"][0]["args"])


def test_the_image_starts_in_a_directory_that_its_user_cannot_write_to() -> None:
    """Ray and Serve import from it."""
    image = (DEPLOY / "Dockerfile").read_text().split("\nFROM ")[-1].splitlines()
    steps = [line.split()[:2] for line in image if line[:1].isupper()]
    kinds = [what for what, _ in steps]
    start = max(at for at, what in enumerate(kinds) if what == "WORKDIR")
    # Root makes it, before the user is another one, and nothing is put there.
    assert kinds.index("USER") > start
    assert not {"COPY", "ADD", "RUN"} & set(kinds[start:])


def kuberay() -> tuple[dict[str, Any], Any]:
    """The Ray cluster, and our settings of the application on it."""
    spec = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())["spec"]
    args = yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"]
    return spec["rayClusterConfig"], from_args(args)


def test_kuberay_has_room_for_the_replicas_and_a_dashboard_with_a_token() -> None:
    cluster, config = kuberay()
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    per_pod = gpus / config.actors.replica_gpus
    assert cluster["enableInTreeAutoscaling"] is True
    assert config.replicas_min < config.replicas_max
    assert workers["minReplicas"] * per_pod == config.replicas_min
    assert workers["maxReplicas"] * per_pod == config.replicas_max
    # Nothing that reads the models lands on the head.
    least = min(config.actors.frontend_cpus, config.actors.replica_cpus)
    assert float(head["rayStartParams"]["num-cpus"]) < least
    assert cluster["authOptions"]["mode"] == "token"
    # Without a version the operator refuses the token's mode.
    pins = (DEPLOY.parent / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pins
    assert "dashboard-host" not in head["rayStartParams"]
    # Prometheus finds every pod's metrics.
    for group in (head, workers):
        (container,) = group["template"]["spec"]["containers"]
        assert {"containerPort": 8080, "name": "metrics"} in container["ports"]


def test_the_section_that_serve_yaml_shows_is_valid(tmp_path: Path) -> None:
    text = (DEPLOY / "serve.yaml").read_text()
    path = tmp_path / "serve.yaml"
    path.write_text(text.replace("# autoscaling:", "autoscaling:"))
    assert from_file(path).replicas_max == 4


def test_the_dashboard_shows_metrics_that_exist_and_shows_all_of_them() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "lockstep.json").read_text())
    text = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    exported = {
        f"ray_{name}" + {"Counter": "_total", "Histogram": "_bucket"}.get(metric.kind, "")
        for name, metric in METRICS.items()
    }
    assert set(re.findall(r"ray_lockstep_\w+", text)) == exported


def test_the_image_copies_all_that_is_packaged_and_nothing_else() -> None:
    root = DEPLOY.parent
    copied: set[str] = set()
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        # What another stage of the image makes is not here.
        if line.startswith("COPY ") and "--from=" not in line:
            copied.update(line.split()[1:-1])
    assert all((root / source).exists() for source in copied), copied
    project = tomllib.loads((root / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in packages} == {one for one in copied if "." not in one} - {
        "LICENSE"
    }


def test_the_image_says_what_lockstep_serve_says_to_ray() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    said = dict(line.removeprefix("ENV ").split("=") for line in lines if line.startswith("ENV "))
    told = ray_environment(ClusterConfig())
    # A call by gRPC does not end with the machine of the other side, so on several it is Ray's.
    of_one_machine = {"RAY_SERVE_PROXY_USE_GRPC", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"}
    assert said == {name: value for name, value in told.items() if name not in of_one_machine}
