"""Proves that known events lead to exactly the actions that were once read and understood: how a
request goes through, ends, is refused or moves on from a replica that drains, fails or is lost.

`tests/sim/trace.py` says how to read the traces and how to write them anew.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.sim.trace import GOLDEN, replay

TRACES = sorted(GOLDEN.glob("*.txt"))


def test_there_are_traces() -> None:
    assert TRACES


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_the_trace_is_as_it_was(path: Path) -> None:
    golden = path.read_text()
    now = replay(golden)
    difference = difflib.unified_diff(
        golden.splitlines(), now.splitlines(), "golden", "now", lineterm="", n=8
    )
    assert golden == now, "\n" + "\n".join(difference)


def test_a_trace_that_differs_is_seen() -> None:
    text = TRACES[0].read_text()
    assert replay(text.replace("    dispatch", "    dispatches", 1)) == text
