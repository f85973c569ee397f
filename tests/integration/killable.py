"""A cluster of fake replicas in a process of its own, whose processes can be killed by name.

So it shares no Ray with the other integration tests.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from cluster.client import Client
from cluster.config import ClusterConfig
from tests.cluster.fakes import fake_loader, load_fake_text

START_S = 120.0
STOP_S = 60.0


def drive(pipe: Connection, config: ClusterConfig, step_s: float) -> None:
    """The driver: starts the cluster as `lockstep serve` does, then kills what it is told to."""
    from ray._private.state import actors

    from cluster import app

    cluster = app.ClusterRun(config)
    try:
        built = app.build_app(config, load=fake_loader(step_s), load_text=load_fake_text)
        cluster.start(built, quiet=True)
        with Client(f"localhost:{config.server.grpc_port}") as client:
            client.wait_until_ready(START_S)
        pipe.send("ready")
        while (part := pipe.recv()) is not None:
            pids = [
                actor["Pid"]
                for actor in actors().values()
                if actor["State"] == "ALIVE" and part in (actor["Name"] or "")
            ]
            os.kill(pids[0], signal.SIGKILL)
            pipe.send(len(pids))
    finally:
        cluster.stop()


@dataclass(frozen=True)
class Killable:
    """A running cluster."""

    address: str
    _pipe: Connection

    def kill(self, part: str) -> int:
        """SIGKILL one process whose actor's name holds `part`; returns how many there were."""
        self._pipe.send(part)
        assert self._pipe.poll(10), "the driver does not answer"
        count: int = self._pipe.recv()
        return count


@contextmanager
def killable_cluster(config: ClusterConfig, step_s: float) -> Iterator[Killable]:
    """Ready to serve, with fake replicas that take `step_s` for a step."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    driver = context.Process(target=drive, args=(theirs, config, step_s))
    driver.start()
    try:
        assert ours.poll(START_S), "the cluster does not start"
        assert ours.recv() == "ready"
        yield Killable(f"localhost:{config.server.grpc_port}", ours)
    finally:
        if driver.is_alive():
            ours.send(None)
        driver.join(STOP_S)
        if driver.is_alive():
            driver.kill()
            driver.join(10)
