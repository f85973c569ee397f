"""Proves that a record differs from a frozen dataclass in how long it takes to make, not else."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace

from scheduler.messages import Batch, BatchKind, Emit, StepRow

ROW = StepRow("a", 10, 4, 2)


def test_equal_records_are_equal_and_of_one_hash() -> None:
    again = StepRow("a", 10, 4, 2)
    assert again == ROW
    assert len({again, ROW, StepRow("a", 11, 4, 2)}) == 2
    assert Emit("a", 1, (2,)) != Emit("a", 1, (3,))


def test_it_is_a_dataclass_without_room_for_other_names() -> None:
    assert [field.name for field in fields(StepRow)] == list(StepRow.__slots__)
    assert not hasattr(ROW, "__dict__")
    assert replace(ROW, length=11) == StepRow("a", 11, 4, 2)


def test_it_goes_through_pickle_and_copy() -> None:
    batch = Batch(1, "r", BatchKind.SPECULATE, rows=(ROW,), draft_len=4)
    assert pickle.loads(pickle.dumps(batch, protocol=5)) == batch
    assert copy.deepcopy(batch) == batch
