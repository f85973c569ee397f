"""Replicas on ranks that are forked from a process that has imported all."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from replicas.config import ReplicaConfig
from replicas.parallel import parallel_replica as parallel
from replicas.parallel.parallel_replica import ParallelReplica, load_parallel

Load = Callable[[ReplicaConfig], ParallelReplica]


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked from a process that has imported all, which a new one does in seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["replicas.parallel"])
    monkeypatch.setattr(
        parallel.multiprocessing, "get_context", lambda method: {"spawn": context}[method]
    )


@pytest.fixture
def load(_forked: None) -> Iterator[Load]:
    with ExitStack() as stack:
        yield lambda config: stack.enter_context(closing(load_parallel(config)))
