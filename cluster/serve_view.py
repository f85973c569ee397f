"""What Serve's controller says of the application: what is up, and why something is not."""

from __future__ import annotations

from ray import serve
from ray.serve.schema import (
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    ReplicaState,
)

APP_NAME = "lockstep"
REPLICA, FRONTEND = "replica", "frontend"
"""Names of the deployments."""
_REFUSALS = ("PairRefused", "TooLittleMemory", "ConfigError", "OSError", "FileNotFoundError")
"""Errors that the same settings meet again; as a traceback's last line begins."""
_ENDED = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly",
    "ray.exceptions.ActorUnavailableError",
    "ray.exceptions.NodeDiedError",
    "ray.exceptions.WorkerCrashedError",
)
"""What ended a replica that started and raised nothing: its node was lost, or something killed it.
Another one may start."""


def application() -> ApplicationStatusOverview | None:
    """None: there is none. Raises what Ray raises where the controller does not answer."""
    return serve.status().applications.get(APP_NAME)


def raised(found: ApplicationStatusOverview) -> list[str]:
    """What each deployment that failed has raised, without the way there; each once."""
    said: dict[str, None] = {}
    for deployment in found.deployments.values():
        if error := error_of(deployment):
            said[error] = None
    return list(said)


def error_of(deployment: DeploymentStatusOverview) -> str:
    """What a replica of it raised as it started; empty if nothing."""
    lines = deployment.message.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    # Without a frame it is no traceback: something is slow, and another deployment's fault.
    return " ".join(lines[frames[-1] + 1 :]) if frames else ""


def is_final(error: str) -> bool:
    """Whether another try meets the same error."""
    name = error.partition(":")[0].rpartition(".")[2]
    return name in _REFUSALS


def reports(found: ApplicationStatusOverview | None) -> list[str]:
    """What there is of each deployment, and what Serve says of it."""
    deployments = found.deployments if found else {}
    return [
        f"{name}: {up(status)} up" + (f" ({one_line(status.message)})" if status.message else "")
        for name, status in deployments.items()
    ]


def up(deployment: DeploymentStatusOverview) -> int:
    return int(deployment.replica_states.get(ReplicaState.RUNNING.value, 0))


def one_line(message: str) -> str:
    return " ".join(message.split())


def frontends_up() -> bool:
    """Whether a frontend serves, and replicas are there or on their way."""
    if (found := application()) is None:
        return False
    states = {name: each.replica_states for name, each in found.deployments.items()}
    coming = (ReplicaState.STARTING, ReplicaState.UPDATING, ReplicaState.RUNNING)
    replicas = sum(states.get(REPLICA, {}).get(state.value, 0) for state in coming)
    return bool(replicas and states.get(FRONTEND, {}).get(ReplicaState.RUNNING.value, 0))


def why_no_replica() -> tuple[str, bool]:
    """Why no replica can start, and whether Serve has given up; empty if nothing is wrong."""
    found = application()
    status = found.deployments.get(REPLICA) if found else None
    if status is None:
        return "", False
    given_up = status.status == DeploymentStatus.DEPLOY_FAILED
    error = error_of(status)
    if error.startswith(_ENDED):
        error = ""
    if not error and given_up:
        error = one_line(status.message)
    return (f"no replica can start: {error}" if error else ""), given_up
