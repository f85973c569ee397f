"""Proves: whatever is packed comes out equal, and shorter than pickle would make it."""

from __future__ import annotations

import pickle
from dataclasses import fields

import pytest

from cluster.pool import protocol
from cluster.transport.packing import _BY_FIELDS, pack, unpack
from scheduler.messages import (
    Batch,
    BatchKind,
    FailureRecord,
    Finish,
    FinishReason,
    Interrupt,
    PrefillRow,
    Priority,
    RecordFailure,
    Reject,
    RejectCode,
    Request,
    RowResult,
    SamplingParams,
    StepFailed,
    StepResult,
    StepRow,
    StepTimes,
    Submit,
    Usage,
)

REQUEST = Request(
    "a-1", (1, 2, 3), 9, SamplingParams(0.5, 3, 0.9, 0.1, 2**62), (7,), 2, 1.5, (4,), Priority.LOW
)
BATCH = Batch(
    2**40,
    "r",
    BatchKind.SPECULATE,
    rows=(StepRow("a-1", 5, 4, 1),),
    draft_len=4,
    steps=3,
    verify_tokens=2,
)
PREFILL = Batch(
    3, "r", BatchKind.PREFILL, prefill=(PrefillRow("a-1", (1, 2), 3, SamplingParams(), (), 1),)
)
RESULT = StepResult(
    1,
    "r",
    (RowResult("a-1", (5, 6), 1, 4, (1, 0), (1, 1)),),
    1,
    StepTimes(0.1, 0.2, 0.3, 0.4),
    5,
    6,
)
FINISH = Finish("a-1", FinishReason.STOP, Usage(3, 4, 5, accepted_at=(1,), replicas=("r",)), "é😀")
MESSAGES = [
    ("submit", ("i", [Submit(REQUEST, True, FailureRecord(1, 2, 3, 4, 5, 6, 7))], ["a-2"])),
    ("pull", ("r", 4, [RESULT, StepFailed("r", 2, "no")], 1.0)),
    protocol.PullReply(
        True, 5, (BATCH, PREFILL, protocol.ReleaseNote(("a-1",)), Interrupt("r", 1)), 2, True
    ),
    protocol.NewsReply("x", True, 2, (("a-1", 0, (5, 6)), FINISH), 1, load=protocol.PoolLoad(1, 9)),
    protocol.SubmitReply("x", (Reject("a-1", RejectCode.OVERLOADED, "f", "m", 1.0),)),
    (True, "ValueError: x"),
    protocol.NewsReply("x", True, 1, (RecordFailure("a-1", FailureRecord(1, rows_limit=1)),)),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_what_is_packed_comes_out_equal_and_of_the_same_types(message: object) -> None:
    out = unpack(pack(message))
    assert out == message
    assert repr(out) == repr(message)


def test_fields_in_the_batch_of_the_constructor_are_all_there_is() -> None:
    assert {Batch, StepResult, protocol.NewsReply} <= set(_BY_FIELDS)
    for cls in _BY_FIELDS:
        assert all(field.init and not field.kw_only for field in fields(cls)), cls


def test_it_is_shorter_than_pickle() -> None:
    for message in MESSAGES[:4]:
        assert len(pack(message)) < len(pickle.dumps(message, protocol=5))
