"""Unit tests of the cluster's parts: without Ray, without weights."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit test that starts Ray is no unit test."""
    import ray

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("unit tests must not start Ray")

    monkeypatch.setattr(ray, "init", refuse)
