"""Proves: pods have room for the replicas, what these read is where they look for it, times fit one
another, and no pod has a right that it does not need."""

from __future__ import annotations

import copy
from typing import Any

import yaml

from tests.cluster.kubernetes.helm import documents, overlaid, render, values
from tests.cluster.kubernetes.operator_rules import groups, needs_kubernetes_api, pod_labels
from tests.cluster.kubernetes.rendered import (
    CASES,
    Rendered,
    config_of,
    of_kind,
    pod_specs,
    ray_service,
    redis,
)

NGINX = "nginx.ingress.kubernetes.io"
LOAD_S = 300
"""That a pod that ends leaves to another one to load its models, at least."""


def test_ray_and_our_settings_take_the_application(rendered: Rendered) -> None:
    from ray.serve.schema import ServeDeploySchema

    service = ray_service(rendered)
    ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    config = config_of(service)
    assert config.auth.has_keys
    assert config.frontend.number == 2
    assert config.actors.replica_gpus == 1


def test_pods_have_room_for_the_replicas(rendered: Rendered) -> None:
    service = ray_service(rendered)
    config = config_of(service)
    head, workers = groups(service)
    gpus = workers.ray["resources"]["limits"]["nvidia.com/gpu"]
    per_pod = gpus / config.replica.tensor_parallel
    assert per_pod == int(per_pod) >= 1
    assert workers.spec["minReplicas"] * per_pod == config.replicas_min
    # A change of the application starts one replica beside the old ones.
    surging = int(config.actors.surge is True)
    assert (workers.spec["maxReplicas"] - surging) * per_pod == config.replicas_max
    # Serve moves the number of replicas, and the autoscaler that of pods: both or neither.
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster.get("enableInTreeAutoscaling", False) is (config.autoscaling is not None)
    # Nothing that reads the models or the keys lands on the head.
    least = min(config.actors.frontend_cpus, config.actors.replica_cpus)
    assert float(head.params["num-cpus"]) < least
    cpus = config.actors.replica_cpus * gpus + config.frontend.number * config.actors.frontend_cpus
    assert float(workers.ray["resources"]["limits"]["cpu"]) >= cpus


def test_no_request_outlives_its_cluster_and_no_move_its_pod(
    rendered: Rendered,
) -> None:
    service = ray_service(rendered)
    config = config_of(service)
    longest_s = config.scheduler.timeout_s_max
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > longest_s
    _, workers = groups(service)
    command = workers.ray["lifecycle"]["preStop"]["exec"]["command"][-1]
    move_s = int(command.partition("--deadline-remaining-seconds=")[2].partition(";")[0])
    assert workers.pod["terminationGracePeriodSeconds"] > move_s + 30
    # Ray lets a process go so long before the deadline; until then another must have loaded.
    assert move_s - config.actors.drain_s > LOAD_S
    for ingress in of_kind(rendered, "Ingress"):
        silence = ingress["metadata"]["annotations"][f"{NGINX}/proxy-read-timeout"]
        assert int(silence) > longest_s


def test_the_models_are_where_workers_look_for_them_before_they_start(
    rendered: Rendered,
) -> None:
    service = ray_service(rendered)
    config = config_of(service)
    _, workers = groups(service)
    volumes = {volume["name"]: volume for volume in workers.pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in workers.ray["volumeMounts"]}
    claim = mounts["/models"]["persistentVolumeClaim"]["claimName"]
    for made in of_kind(rendered, "PersistentVolumeClaim"):
        assert made["metadata"]["name"] == claim
    for job in of_kind(rendered, "Job"):
        spec = job["spec"]["template"]["spec"]
        assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
        (script,) = spec["containers"][0]["args"]
        folder = script.partition("mkdir -p ")[2].partition("\n")[0]
        named = [config.replica.target, config.replica.drafting.model or ""]
        places = [place for place in named if place.startswith("/")]
        assert places
        for place in places:
            assert place.startswith(f"/models/{folder}/")
            assert f"--local-dir {place.rpartition('/')[2]}\n" in script
        (waits,) = workers.pod["initContainers"]
        assert f"test -e /models/{folder}/complete;" in waits["args"][0]
        assert script.splitlines()[-1] == "touch complete"
    if not of_kind(rendered, "Job"):
        assert "initContainers" not in workers.pod
    keys = mounts["/etc/lockstep"]["secret"]["secretName"]
    assert keys == "lockstep-keys"
    # What is written below a place of its own lies on a volume.
    for place in [variable["value"] for variable in workers.ray["env"]]:
        assert not place.startswith("/") or f"/{place.split('/')[1]}" in mounts


def test_a_chart_with_other_models_or_another_image_has_another_job() -> None:
    def job(**changed: Any) -> str:
        (made,) = of_kind(documents(render(overlaid(values(), changed))), "Job")
        return made["metadata"]["name"]

    # The old cluster still reads the old models, so they stay as they are.
    revised = {"models": {"targetRevision": "0123abc"}}
    assert len({job(), job(**revised), job(image={"tag": "next"})}) == 3


# --------------------------------------------------------------------------- rights


def test_no_pod_has_a_right_that_it_does_not_need(rendered: Rendered) -> None:
    stateful = redis()[1]["spec"]["template"]["spec"]
    for name, spec in (pod_specs(rendered) | {"redis": stateful}).items():
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] > 0, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"] + spec.get("initContainers", []):
            closed(container["securityContext"], name)
            assert container["resources"]["limits"].keys() >= {"cpu", "memory"}, name
    service = ray_service(rendered)
    for group in groups(service):
        needed = needs_kubernetes_api(service, group)
        assert group.pod.get("automountServiceAccountToken", True) is needed, group.name
    options = service["spec"]["rayClusterConfig"].get("autoscalerOptions")
    if options:
        closed(options["securityContext"], "autoscaler")


def closed(security: dict[str, Any], name: str) -> None:
    assert security["allowPrivilegeEscalation"] is False, name
    assert security["readOnlyRootFilesystem"] is True, name
    assert security["capabilities"] == {"drop": ["ALL"]}, name


def test_workers_are_on_nodes_of_their_own_where_there_are_enough(rendered: Rendered) -> None:
    service = ray_service(rendered)
    head, workers = groups(service)
    (spread,) = workers.pod["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    counted = spread["labelSelector"]["matchLabels"].items()
    assert counted <= pod_labels(service, workers).items()
    assert not counted <= pod_labels(service, head).items()


def test_a_digest_pins_the_image_of_every_container() -> None:
    case = copy.deepcopy(CASES["own volume, cache and digest"])
    rendered = documents(render(overlaid(case, {"models": {"download": True}})))
    for spec in pod_specs(rendered).values():
        for container in spec["containers"] + spec.get("initContainers", []):
            assert container["image"] == "lockstep:0.1.0@sha256:" + 64 * "0"
