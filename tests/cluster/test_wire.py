"""Proves that an error at a request's end has the right status and the client's name for it."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from cluster.wire import Refusal, refusal_of_finish
from scheduler.messages import Finish, FinishReason


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_request_served_in_full_is_no_error(reason: FinishReason) -> None:
    assert refusal_of_finish(Finish("pool-1", reason), "mine") is None


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FinishReason.CANCELLED, StatusCode.CANCELLED),
        (FinishReason.DEADLINE, StatusCode.DEADLINE_EXCEEDED),
        (FinishReason.FAILED, StatusCode.INTERNAL),
    ],
)
def test_others_are_named_as_the_client_named_them(reason: FinishReason, code: StatusCode) -> None:
    refusal = refusal_of_finish(Finish("pool-1", reason, message="out of memory"), "mine")
    assert refusal == Refusal(code, "request mine: out of memory")
    assert refusal_of_finish(Finish("pool-1", reason, message="no"), "") == Refusal(code, "no")
    unsaid = refusal_of_finish(Finish("pool-1", reason), "mine")
    assert unsaid is not None
    assert len(unsaid.message) > len("request mine: ")
    assert "pool-1" not in unsaid.message
