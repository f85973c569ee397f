"""Proves: no output that cannot be written costs another."""

from __future__ import annotations

from pathlib import Path

from cluster.bench.outputs import write_each
from cluster.bench.report_json import to_json
from tests.cluster.bench.test_report import report


def test_a_file_that_fails_costs_no_other(tmp_path: Path) -> None:
    def fails(_report: object) -> str:
        raise ValueError("no such text")

    fine = tmp_path / "a.json"
    wrong = write_each(report(), [(tmp_path, to_json), (tmp_path / "b", fails), (fine, to_json)])
    assert [f"{tmp_path} was not" in wrong[0], "no such text" in wrong[1]] == [True, True]
    assert len(wrong) == 2
    assert fine.read_text() == to_json(report())
