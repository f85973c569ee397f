"""Unit tests of the cluster's parts: without Ray, without weights."""

from __future__ import annotations

import asyncio
import inspect
import random

import pytest
import uvloop


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit test that starts Ray is no unit test."""
    import ray

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("unit tests must not start Ray")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens hardly wait for more of them."""
    monkeypatch.setattr("cluster.pool.peers.GATHER_S", 0.002)
    monkeypatch.setattr("cluster.frontend.answer._CHUNKS_PER_S", 1e6)


@pytest.fixture(autouse=True)
def _same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that names no seed gets another one each time, but the same ones in each run."""
    monkeypatch.setattr("secrets.randbelow", random.Random(0).randrange)


@pytest.fixture(autouse=True)
def _patient_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake on a busy machine takes long."""
    monkeypatch.setattr("cluster.transport.endpoint._CONNECT_S", 60.0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine function, on such an event loop as Ray gives its actors."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
