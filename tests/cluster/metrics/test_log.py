"""Proves: what we log stands in the file that Serve keeps for a replica, in Serve's form, and of a
line that Serve repeats ten times a second there is one in a while; and in either form a line says
which logger it is of, as JSON with a request's figures as fields.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest

from cluster.config import LogFormat
from cluster.metrics import CallRecord, log as log_module
from cluster.metrics.log import form_here, log_to_stderr, said_by
from cluster.worker.loading import LOGGER, stage


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
    log_to_stderr("text")
    log_to_stderr("text")
    logging.getLogger("lockstep.frontend").info("request id=%r", "a")
    assert files.read_text() == '{"said": "request id=\'a\'"}\n'


def test_of_a_line_that_repeats_there_is_one_in_a_while(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_to_stderr("text")
    serves = logging.getLogger("ray.serve")
    for _ in range(20):
        serves.info("Waiting for an additional 0.1s to shut down: 1 ongoing requests")
        serves.info("another")
    assert files.read_text().count("Waiting") == 1
    assert files.read_text().count("another") == 20
    monkeypatch.setattr(log_module, "_WAITING_S", 0.0)
    serves.info("Waiting for an additional 0.1s to shut down: 1 ongoing requests")
    assert files.read_text().count("Waiting") == 2


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_stage_is_read_back_from_its_line_and_no_other_line_is(
    files: Path, capsys: pytest.CaptureFixture[str], form: LogFormat
) -> None:
    log_to_stderr(form)
    assert form_here() == form
    stage('reads "weights": 10 %')
    logging.getLogger("lockstep.frontend").info('{"name": "%s"}', LOGGER)
    stages = [said_by(LOGGER, line) for line in capsys.readouterr().err.splitlines()]
    assert stages == ['reads "weights": 10 %', ""]


def test_as_json_the_line_of_a_request_has_its_figures_as_fields(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = CallRecord('a"\n', "", "OK", 1, 3, 8, 5.0, 5.01, 5.1, 5.2, [])
    log_to_stderr("json")
    logging.getLogger("lockstep.frontend").info("%s", record)
    (line,) = capsys.readouterr().err.splitlines()
    read = json.loads(line)
    assert read["message"] == str(record)
    assert {name: read[name] for name in record.log_fields} == record.log_fields
    assert (read["id"], read["status"], read["total_s"]) == ('a"\n', "OK", 0.2)
