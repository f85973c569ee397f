"""Proves: two minutes of changes and of killing every kind of process, first under a real pair and
then under fakes, lose, double and change no token.

The same code as `python -m tests.chaos`, which replays this run with `--seed 20 --minutes 2`.
Runs last among the integration tests, in processes of its own.
"""

from __future__ import annotations

import pytest

from tests.chaos.http_load import PYTHON
from tests.chaos.kills import Kind
from tests.chaos.phases import is_clean, run_all, sentences

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SEED = 20
SECONDS = 120.0
"""Enough for every kind once in each of the two halves."""


def test_chaos_loses_doubles_and_changes_nothing() -> None:
    phases = run_all(SEED, SECONDS, real_share=0.5, kinds=list(Kind), say=print)
    report = "\n".join(sentences(figures) for figures in phases)
    print(report)
    assert [figures["phase"] for figures in phases] == ["real pair", "fakes"]
    assert all(map(is_clean, phases)), f"seed {SEED}:\n{report}"
    for kind in Kind:
        assert sum(figures["kills"][kind.value] for figures in phases) >= 1, f"no {kind}"
    for figures in phases:
        verdicts = figures["verdicts"]
        # A run in which hardly anything was asked or hit would prove nothing.
        assert verdicts["right"] > 20
        assert verdicts["cancelled"] > 0
        assert verdicts["deadline"] > 0
        assert figures["recovered"] > 0
        assert figures["over_http"] > 20 or not PYTHON.exists()
        assert {"pool", "replica", "frontend"} <= {process["kind"] for process in figures["memory"]}
