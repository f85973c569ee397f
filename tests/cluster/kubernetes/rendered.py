"""What the chart renders for the values that the tests look at, and parts of it."""

from __future__ import annotations

from typing import Any

import yaml

from cluster.config import ClusterConfig
from cluster.config_sources import from_args
from tests.cluster.kubernetes.helm import DEPLOY, EXAMPLES, documents, overlaid, values
from tests.cluster.kubernetes.operator_rules import groups

Rendered = list[dict[str, Any]]


def settings(name: str) -> dict[str, Any]:
    return values(*(path for path in EXAMPLES if path.stem == name))


CASES = {
    "values": values(),
    **{path.stem: values(path) for path in EXAMPLES},
    "no draft": overlaid(values(), {"models": {"draft": ""}}),
    "own volume, cache and digest": overlaid(
        values(),
        {
            "image": {"digest": "sha256:" + 64 * "0", "pullSecrets": [{"name": "registry"}]},
            "models": {"download": False, "createClaim": False},
            "gpu": {"nodeSelector": {"gpu": "h100"}, "replicasPerPod": 2},
            "kernelCacheClaim": "kernels",
            "networkPolicy": {"enabled": False},
        },
    ),
    "private models": overlaid(
        values(), {"models": {"tokenSecret": "hub", "storageClass": "shared"}}
    ),
}


def of_kind(rendered: Rendered, kind: str) -> Rendered:
    return [document for document in rendered if document["kind"] == kind]


def ray_service(rendered: Rendered) -> dict[str, Any]:
    (service,) = of_kind(rendered, "RayService")
    return service


def config_of(service: dict[str, Any]) -> ClusterConfig:
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    return from_args(serve["applications"][0]["args"])


def pod_specs(rendered: Rendered) -> dict[str, dict[str, Any]]:
    """Of all pods that we write, by a name for each."""
    pods = {group.name: group.spec["template"]["spec"] for group in groups(ray_service(rendered))}
    jobs = {job["metadata"]["name"]: job for job in of_kind(rendered, "Job")}
    return pods | {name: job["spec"]["template"]["spec"] for name, job in jobs.items()}


def redis() -> Rendered:
    return documents((DEPLOY / "redis.yaml").read_text())
