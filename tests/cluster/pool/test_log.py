"""Proves: what we log stands in the file that Serve keeps for a replica, in Serve's form, and of a
line that Serve repeats ten times a second there is one in a while.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest

from cluster.pool import ray_pool
from cluster.pool.ray_pool import log_to_stderr


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    """Serve's logger as a replica has it, and ours as it is at first."""
    ours, serves = logging.getLogger("lockstep"), logging.getLogger("ray.serve")
    before = [(each, each.handlers, each.level, each.propagate) for each in (ours, serves)]
    file = logging.FileHandler(tmp_path / "replica.log")
    file.setFormatter(logging.Formatter('{"said": "%(message)s"}'))
    ours.handlers, serves.handlers = [], [MemoryHandler(1, target=file)]
    serves.setLevel(logging.INFO)
    try:
        yield tmp_path / "replica.log"
    finally:
        file.close()
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def test_a_line_of_ours_is_in_serves_file(files: Path) -> None:
    log_to_stderr()
    log_to_stderr()
    logging.getLogger("lockstep.frontend").info("request id=%r", "a")
    assert files.read_text() == '{"said": "request id=\'a\'"}\n'


def test_of_a_line_that_repeats_there_is_one_in_a_while(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_to_stderr()
    serves = logging.getLogger("ray.serve")
    for _ in range(20):
        serves.info("Waiting for an additional 0.1s to shut down: 1 ongoing requests")
        serves.info("another")
    assert files.read_text().count("Waiting") == 1
    assert files.read_text().count("another") == 20
    monkeypatch.setattr(ray_pool, "_WAITING_S", 0.0)
    serves.info("Waiting for an additional 0.1s to shut down: 1 ongoing requests")
    assert files.read_text().count("Waiting") == 2
