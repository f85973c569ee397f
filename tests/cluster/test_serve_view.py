"""Proves: what Serve says of the application is read right: whether a frontend that is new may take
over, and why no replica starts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve.schema import DeploymentStatus

from cluster.serve_view import APP_NAME, frontends_up, is_final, why_no_replica

TRACE = "A replica failed to start. Error:\n\nray::x\n  File y, line 3\nOSError: no such\nmodel"

LOST = (
    "A replica failed to start. Error:\n\nTraceback (most recent call last):\n  File y, line 3\n"
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: ServeReplica\nThe actor died because its node has died."
)


def says(patch: pytest.MonkeyPatch, **deployments: Any) -> None:
    found = SimpleNamespace(deployments=deployments)
    applications = {APP_NAME: found} if deployments else {}
    patch.setattr(serve, "status", lambda: SimpleNamespace(applications=applications))


def deployment(message: str = "", status: str = "UPDATING", **states: int) -> Any:
    return SimpleNamespace(
        message=message, status=DeploymentStatus(status), replica_states=dict(states)
    )


@pytest.mark.parametrize(
    ("frontend", "replica", "up"),
    [
        # The very first ones wait for nobody.
        ({"STARTING": 2}, {"STARTING": 2}, False),
        ({"STARTING": 1, "RUNNING": 1}, {"STARTING": 1, "RUNNING": 1}, True),
        # The old replica has gone, the new one is on its way.
        ({"STARTING": 1, "RUNNING": 1}, {"STARTING": 1, "STOPPING": 1}, True),
        # Scaled to zero: nobody would come.
        ({"STARTING": 1, "RUNNING": 1}, {}, False),
        # Those before are gone.
        ({"STARTING": 1, "STOPPING": 1}, {"RUNNING": 1}, False),
    ],
)
def test_a_new_frontend_waits_while_another_serves_and_replicas_are_to_come(
    frontend: dict[str, int], replica: dict[str, int], up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, frontend=deployment(**frontend), replica=deployment(**replica))
    assert frontends_up() == up


def test_without_an_application_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch)
    assert not frontends_up()
    assert why_no_replica() == ("", False)


@pytest.mark.parametrize(
    ("replica", "said"),
    [
        (deployment(STARTING=1), ("", False)),
        (deployment("has replicas that take long", STARTING=1), ("", False)),
        (deployment(TRACE, STARTING=1), ("no replica can start: OSError: no such model", False)),
        (
            deployment(TRACE, "DEPLOY_FAILED"),
            ("no replica can start: OSError: no such model", True),
        ),
        (deployment("gave\nup", "DEPLOY_FAILED"), ("no replica can start: gave up", True)),
        # It raised nothing: the node on which it started was lost.
        (deployment(LOST, STARTING=1), ("", False)),
    ],
)
def test_why_no_replica_starts_is_what_one_has_raised(
    replica: Any, said: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, replica=replica)
    assert why_no_replica() == said


def test_an_error_that_the_same_settings_meet_again_is_final() -> None:
    assert is_final("replicas.errors.PairRefused: no")
    assert is_final("OSError: gone")
    assert not is_final("torch.OutOfMemoryError: all")
    assert not is_final("RuntimeError: OSError: no")
