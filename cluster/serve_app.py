"""An application as Serve's controller sees it: whether it is up, why it is not, its end at once.

Also whose the Ray below it is. What is deployed is not known here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import ray
from ray import serve
from ray._private import worker
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview
from ray.util import list_named_actors

_LOOK_S = 0.25
"""Between two looks; each is work for Serve's controller."""
_DELETE_S = 10.0
"""For Serve to notice what was killed; it looks several times a second."""


class StartFailed(RuntimeError):
    """The application did not come up; the message says why."""


def began_ray_here() -> bool:
    """Whether this process has begun the Ray that it is connected to; False if it was joined.

    `ray.init` does not say which of the two it did. `ray.shutdown` decides by the same node what
    it ends; a Ray client (`ray://`) has none.
    """
    node = worker._global_node
    return node is not None and bool(node.is_head())


class ServeApp:
    """One application, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def wait_until(
        self,
        done: Callable[[bool], bool],
        bound_s: float,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Returns when `done` says so, which is told whether all replicas are up.

        Raises StartFailed when Serve gives up, and after `bound_s`.
        """
        deadline_s = time.monotonic() + bound_s
        while not done(self._is_running()):
            if time.monotonic() > deadline_s:
                late = f"not up within {bound_s:g} s (actors.start_s)"
                raise StartFailed("; ".join([late, *self._reports()]))
            sleep(_LOOK_S)

    def _is_running(self) -> bool:
        application = self._look()
        if application is None:
            raise StartFailed("the application was deleted while it started")
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            # Serve itself says which deployments failed, and not why.
            reasons = _raised(application) or [_one_line(application.message)]
            raise StartFailed("; ".join(reasons))
        return bool(application.status == ApplicationStatus.RUNNING)

    def _reports(self) -> list[str]:
        """What there is of each deployment, and what Serve says of it."""
        application = self._look()
        deployments = application.deployments if application else {}
        return [
            f"{name}: {_up(one)} up" + (f" ({_one_line(one.message)})" if one.message else "")
            for name, one in deployments.items()
        ]

    def replicas_up(self, deployment: str) -> int:
        application = self._look()
        found = application.deployments.get(deployment) if application else None
        return _up(found) if found else 0

    def delete_at_once(self) -> None:
        """Delete it and kill its replicas, which Serve would let drain first.

        After ten seconds the rest is left to Serve, which goes on with it by itself.
        """
        if self._look() is None:
            return
        serve.delete(self._name, _blocking=False)
        deadline_s = time.monotonic() + _DELETE_S
        while (application := self._look()) and time.monotonic() < deadline_s:
            # Before that Serve would replace them.
            if application.status == ApplicationStatus.DELETING:
                self._kill_replicas()
            time.sleep(_LOOK_S)

    def _kill_replicas(self) -> None:
        for actor in list_named_actors(all_namespaces=True):
            if actor["name"].startswith(f"SERVE_REPLICA::{self._name}#"):
                # It may have ended by itself.
                with contextlib.suppress(ValueError):
                    ray.kill(ray.get_actor(**actor))

    def _look(self) -> ApplicationStatusOverview | None:
        return serve.status().applications.get(self._name)


def _raised(application: ApplicationStatusOverview) -> list[str]:
    """What each deployment that failed has raised, without the way there; each once."""
    said: dict[str, None] = {}
    for one in application.deployments.values():
        lines = one.message.strip().splitlines()
        frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
        # Without a frame it is no traceback: something is slow, and another deployment's fault.
        if frames:
            said[" ".join(lines[frames[-1] + 1 :])] = None
    return list(said)


def _up(deployment: DeploymentStatusOverview) -> int:
    return int(deployment.replica_states.get("RUNNING", 0))


def _one_line(message: str) -> str:
    return " ".join(message.split())
