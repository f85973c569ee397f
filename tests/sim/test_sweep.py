"""Proves: a world of the sweep is given by seed and number alone, and a wrong one is reported."""

from __future__ import annotations

import sys
import time

import pytest

from tests.sim import __main__ as command, sweep


def test_seed_and_number_give_the_world() -> None:
    drawn = [sweep.draw(5, number) for number in range(50)]
    assert drawn == [sweep.draw(5, number) for number in range(50)]
    assert len({seed for seed, _ in drawn}) == 50
    assert drawn[0] != sweep.draw(6, 0)


def test_worlds_that_hold_end_with_status_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sim", "--worlds", "5", "--processes", "1"])
    assert command.main() == 0
    assert "5 worlds in" in capsys.readouterr().out


def test_a_wrong_world_ends_with_status_1_and_how_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_args: object) -> None:
        raise AssertionError("q3 ended 2 times")

    monkeypatch.setattr(sweep, "check", broken)
    monkeypatch.setattr(sys, "argv", ["sim", "--worlds", "2", "--processes", "1", "--seed", "9"])
    assert command.main() == 1
    said = capsys.readouterr().out
    assert "q3 ended 2 times" in said
    assert "replay: python -m tests.sim --seed 9 --first 1 --worlds 1" in said


def test_a_world_that_never_ends_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "WORLD_S_MAX", 1)
    monkeypatch.setattr(sweep, "check", lambda *_args: time.sleep(30))
    assert "still running after 1 s" in sweep.run_world(0, seed=0).failure
