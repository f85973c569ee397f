"""What the KubeRay operator refuses, ignores, adds and selects, for releases 1.5 to 1.7.

Read from the operator's source at the tags v1.5.1, v1.6.2 and v1.7.0; each rule names its file
below `ray-operator/`. Only rules that a RayService of ours could break are here. The CRD's types
are in `rayservice.schema.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Spec = Mapping[str, Any]
Version = tuple[int, int]
VERSIONS: tuple[Version, ...] = ((1, 5), (1, 6), (1, 7))


class Group(NamedTuple):
    """The head group, or one of workers."""

    name: str
    is_head: bool
    spec: Spec

    @property
    def pod(self) -> Spec:
        return self.spec["template"]["spec"]

    @property
    def ray(self) -> Spec:
        """The container that Ray runs in: the first (controllers/ray/utils/constant.go,
        RayContainerIndex)."""
        return self.pod["containers"][0]

    @property
    def params(self) -> Mapping[str, str]:
        return self.spec.get("rayStartParams", {})


def groups(service: Spec) -> list[Group]:
    cluster = service["spec"]["rayClusterConfig"]
    workers = cluster.get("workerGroupSpecs", [])
    # The head's group has this name in constant.go (RayNodeHeadGroupLabelValue).
    head = Group("headgroup", True, cluster["headGroupSpec"])
    return [head, *(Group(spec["groupName"], False, spec) for spec in workers)]


def problems(service: Spec, version: Version) -> list[str]:
    """Why this release does not bring the RayService up, or not as it is written."""
    return [found for rule in _RULES for found in rule(service, version)]


# ------------------------------------------------------------------------- what the operator makes


def serve_service(service: Spec, version: Version) -> dict[str, Any] | None:
    """The Service of Serve: its name, ports and selector; None: it is not made, and the RayService
    never becomes ready.

    controllers/ray/common/service.go, BuildServeService: up to 1.5 only the port that is named
    `serve`, from 1.6 on those named `serve-...` too, of the head's first container.
    controllers/ray/utils/util.go, GenerateServeServiceName.
    """
    head = groups(service)[0]
    ports = {port["name"]: port["containerPort"] for port in head.ray.get("ports", [])}
    serving = {
        name: number
        for name, number in ports.items()
        if name == "serve" or (version >= (1, 6) and name.startswith("serve-"))
    }
    if not serving:
        return None
    selector = {"ray.io/cluster": cluster_name(service), "ray.io/serve": "true"}
    return {
        "name": service["metadata"]["name"] + "-serve-svc",
        "ports": serving,
        "selector": selector,
    }


def cluster_name(service: Spec) -> str:
    """One of those that controllers/ray/utils/util.go, GenerateRayClusterName, may draw."""
    return service["metadata"]["name"] + "-abcde"


def pod_labels(service: Spec, group: Group) -> dict[str, str]:
    """controllers/ray/common/pod.go, labelPod and BuildPod. The head's `ray.io/serve` is what
    controllers/ray/rayservice_controller.go, updateHeadPodServeLabel, sets later: here of a head
    whose proxy is healthy."""
    kind = "head" if group.is_head else "worker"
    excluded = service["spec"].get("excludeHeadPodFromServeSvc", False)
    fixed = {
        "ray.io/node-type": kind,
        "ray.io/group": group.name,
        "ray.io/cluster": cluster_name(service),
    }
    labels = {
        "ray.io/is-ray-node": "yes",
        "ray.io/identifier": f"{cluster_name(service)}-{kind}",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
        **group.spec["template"].get("metadata", {}).get("labels", {}),
    }
    serves = not (group.is_head and excluded)
    return {**labels, **fixed, "ray.io/serve": str(serves).lower()}


def injected_probes(group: Group) -> list[str]:
    """Probes that controllers/ray/common/pod.go, initLivenessAndReadinessProbe, adds because the
    container has none of its own. Theirs run bash and wget in the image; from 1.6 on some are
    plain HTTP, if rayVersion is 2.53 or later."""
    return [name for name in ("livenessProbe", "readinessProbe") if name not in group.ray]


def needs_kubernetes_api(service: Spec, group: Group) -> bool:
    """Whether the autoscaler is put into the pod, with a service account that the operator makes:
    controllers/ray/common/pod.go, DefaultHeadPodTemplate, and common/rbac.go."""
    return group.is_head and _autoscales(service)


# --------------------------------------------------------------------------- what it refuses


def _name(service: Spec, _version: Version) -> Iterator[str]:
    """utils/validation.go, ValidateRayServiceMetadata; constant.go, MaxRayServiceNameLength."""
    name = service["metadata"]["name"]
    if len(name) > 47 or not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", name):
        yield f"metadata.name: {name}"


def _upgrade(service: Spec, _version: Version) -> Iterator[str]:
    """utils/validation.go, ValidateRayServiceSpec. NewClusterWithIncrementalUpgrade is left out:
    it needs a feature gate and a Gateway."""
    kind = service["spec"].get("upgradeStrategy", {}).get("type", "NewCluster")
    if kind not in ("NewCluster", "None"):
        yield f"upgradeStrategy.type: {kind}"
    if service["spec"].get("rayClusterDeletionDelaySeconds", 60) < 0:
        yield "rayClusterDeletionDelaySeconds: negative"
    if service["spec"]["rayClusterConfig"]["headGroupSpec"].get("headService", {}).get("name"):
        yield "headGroupSpec.headService: has a name"


def _ports(service: Spec, version: Version) -> Iterator[str]:
    """`serve_service`; utils/util.go, FetchHeadServiceURL: the head's Service has the ports of its
    container, and the operator looks for the one that is named `dashboard`."""
    if serve_service(service, version) is None:
        yield "headGroupSpec: no port named serve"
    names = [port.get("name") for port in groups(service)[0].ray.get("ports", [])]
    if "dashboard" not in names:
        yield "headGroupSpec: no port named dashboard"


def _groups(service: Spec, _version: Version) -> Iterator[str]:
    """utils/validation.go, ValidateRayClusterSpec, validateRayGroupResources and -Labels."""
    for group in groups(service):
        if not group.pod.get("containers"):
            yield f"{group.name}: no container"
        own = {"num-cpus", "num-gpus", "memory", "resources"} & group.params.keys()
        if own and group.spec.get("resources"):
            yield f"{group.name}: resources in rayStartParams and in resources"
        if "labels" in group.params:
            yield f"{group.name}: rayStartParams.labels"
        if group.is_head:
            continue
        least, most = group.spec.get("minReplicas"), group.spec.get("maxReplicas")
        if least is None or most is None:
            yield f"{group.name}: minReplicas and maxReplicas must be set"
        elif not 0 <= least <= most:
            yield f"{group.name}: minReplicas {least}, maxReplicas {most}"


def _autoscaler(service: Spec, _version: Version) -> Iterator[str]:
    """utils/validation.go, ValidateRayClusterSpec. Without a version Ray 2.60 starts the second
    autoscaler (ray/scripts/scripts.py, start), and the operator treats the pods as the first's."""
    if not _autoscales(service):
        return
    options = service["spec"]["rayClusterConfig"].get("autoscalerOptions", {})
    if options.get("version") != "v2":
        yield "autoscalerOptions.version: v2 is what Ray starts"
    if options.get("idleTimeoutSeconds", 0) < 0:
        yield "autoscalerOptions.idleTimeoutSeconds: negative"
    for group in groups(service):
        if group.pod.get("restartPolicy", "Never") != "Never":
            yield f"{group.name}: restartPolicy must be Never with autoscaler v2"
        if "RAY_enable_autoscaler_v2" in _env(group.ray):
            yield f"{group.name}: RAY_enable_autoscaler_v2 beside autoscalerOptions.version"
        # Without its token the autoscaler does nothing; with a name of ours, the operator makes no
        # account, and a second cluster's autoscaler may not change its own (common/rbac.go).
        if group.is_head and group.pod.get("automountServiceAccountToken") is False:
            yield "headGroupSpec: the autoscaler has no token"
        if group.is_head and group.pod.get("serviceAccountName"):
            yield "headGroupSpec: a service account of ours needs a role for every new cluster"


def _token(service: Spec, _version: Version) -> Iterator[str]:
    """utils/validation.go, ValidateRayClusterSpec: authOptions.mode token."""
    cluster = service["spec"]["rayClusterConfig"]
    if cluster.get("authOptions", {}).get("mode") != "token":
        return
    parts = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", cluster.get("rayVersion", ""))
    if parts is None or tuple(map(int, parts.groups())) < (2, 52, 0):
        yield f"rayVersion: {cluster.get('rayVersion')} is no Ray from 2.52 on"


def _redis(service: Spec, _version: Version) -> Iterator[str]:
    """utils/validation.go, ValidateRayClusterSpec: Redis only through gcsFaultToleranceOptions.
    raycluster_controller.go, buildRedisCleanupJob: runs the head's container without Ray, and takes
    the liveness and the readiness probe away, not a startup probe."""
    head = groups(service)[0]
    for name in ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"):
        if name in _env(head.ray):
            yield f"headGroupSpec: {name} in env"
    for name in ("redis-password", "redis-username"):
        if name in head.params:
            yield f"headGroupSpec: {name} in rayStartParams"
    tolerant = "gcsFaultToleranceOptions" in service["spec"]["rayClusterConfig"]
    if tolerant and "startupProbe" in head.ray:
        yield "headGroupSpec: the job that cleans up Redis would fail its startup probe"


def _pods(service: Spec, _version: Version) -> Iterator[str]:
    """common/pod.go: BuildPod writes the command `ray start` unless one is there that says it;
    setContainerEnvVars appends what it manages; addEmptyDir takes a volume of its name as its own;
    DefaultWorkerPodTemplate adds wait-gcs-ready, and DefaultHeadPodTemplate autoscaler."""
    managed = {"RAY_CLUSTER_NAME", "RAY_CLUSTER_NAMESPACE", "RAY_CLOUD_INSTANCE_ID"}
    managed |= {"RAY_NODE_TYPE_NAME", "KUBERAY_GEN_RAY_START_CMD", "FQ_RAY_IP", "RAY_IP"}
    for group in groups(service):
        if "command" in group.ray or "args" in group.ray:
            yield f"{group.name}: a command of ours runs before ray start"
        for name in managed & _env(group.ray).keys():
            yield f"{group.name}: {name} in env"
        for volume in group.pod.get("volumes", []):
            if volume["name"] in ("shared-mem", "ray-logs", "gcs-storage"):
                yield f"{group.name}: volume {volume['name']} is the operator's"
        containers = [*group.pod.get("initContainers", []), *group.pod["containers"]]
        for container in containers:
            if container["name"] in ("wait-gcs-ready", "autoscaler"):
                yield f"{group.name}: container {container['name']} is the operator's"
        # ray start writes below /tmp, and the container that waits for the head has these mounts.
        mounts = [mount["mountPath"] for mount in group.ray.get("volumeMounts", [])]
        if _read_only(group.ray) and "/tmp" not in mounts:
            yield f"{group.name}: Ray cannot write to /tmp"
    options = service["spec"]["rayClusterConfig"].get("autoscalerOptions", {})
    volumes = {volume["name"] for volume in groups(service)[0].pod.get("volumes", [])}
    for mount in options.get("volumeMounts", []):
        if mount["name"] not in volumes:
            yield f"autoscalerOptions.volumeMounts: the head has no volume {mount['name']}"


_RULES: tuple[Callable[[Spec, Version], Iterator[str]], ...] = (
    *(_name, _upgrade, _ports, _groups, _autoscaler, _token, _redis, _pods),
)


def _autoscales(service: Spec) -> bool:
    return bool(service["spec"]["rayClusterConfig"].get("enableInTreeAutoscaling"))


def _env(container: Spec) -> dict[str, Spec]:
    return {variable["name"]: variable for variable in container.get("env", [])}


def _read_only(container: Spec) -> bool:
    return bool(container.get("securityContext", {}).get("readOnlyRootFilesystem"))
