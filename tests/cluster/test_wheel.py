"""Proves: none of the modules that a wheel compiles has a class that processes send each other."""

from __future__ import annotations

import ast
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from cluster import protocol
from scheduler.beliefs import Beliefs
from scheduler.config import SchedulerConfig
from scheduler.messages import Action, Batch, Event, FinishReason, StepResult
from scheduler.status import PoolStatus

ROOT = Path(__file__).parents[2]


def _classes_within(kind: object, seen: set[type]) -> set[type]:
    """The classes of this one's fields, of theirs, and so on."""
    for part in get_args(kind):
        _classes_within(part, seen)
    if (
        isinstance(kind, type)
        and kind not in seen
        and kind.__module__.startswith(("scheduler.", "cluster."))
    ):
        seen.add(kind)
        if is_dataclass(kind):
            for each in get_type_hints(kind).values():
                _classes_within(each, seen)
    return seen


def test_what_processes_send_each_other_is_not_compiled() -> None:
    """Instances of a compiled class cannot be pickled."""
    (names,) = [
        ast.literal_eval(one.value)
        for one in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "COMPILED"
    ]
    sent = set[type]()
    replies = [one for one in vars(protocol).values() if is_dataclass(one)]
    for kind in (Event, Action, PoolStatus, SchedulerConfig, *replies):
        _classes_within(kind, sent)
    assert {Beliefs, Batch, StepResult, FinishReason} <= sent
    assert not {kind.__module__ for kind in sent} & {f"scheduler.{name}" for name in names}
    for name in names:
        assert (ROOT / "scheduler" / f"{name}.py").exists(), name
