"""Proves that an error at a request's end has the right status and the client's name for it, and
that a status answer sums over the replicas.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from grpc import StatusCode

from cluster.frontend.grpc_api.status import to_status
from cluster.frontend.status_codes import Refusal, refusal_of_finish
from cluster.pool.protocol import PoolView
from protos import lockstep_pb2 as pb
from scheduler.draft_length import CostEstimates
from scheduler.messages import Finish, FinishReason, ReplicaSpec
from scheduler.state import BatchFigures
from scheduler.status import PoolStatus, ReplicaStatus


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
    assert len(unsaid.message) > len("request mine: ")
    assert "pool-1" not in unsaid.message


def replica_status(name: str, batches: int, spread_sum: int) -> ReplicaStatus:
    return ReplicaStatus(
        id=name,
        spec=ReplicaSpec(
            kv_blocks=100,
            block_size=16,
            context_len=512,
            vocab_size=320,
            attention="paged",
            arithmetic="joined layers",
            drafter="suffix",
        ),
        figures=BatchFigures(
            step_batches=batches,
            spread_sum=spread_sum,
            prefill_tokens=10,
            reused_tokens=2,
        ),
    )


def test_a_status_answer_sums_spread_over_the_replicas() -> None:
    replicas = (replica_status("a", 3, 12), replica_status("b", 1, 5))
    view = PoolView("one", 2.0, PoolStatus(0, 0, replicas, finished={}))
    answer = to_status(view)
    assert (answer.batches, answer.batch_spread_sum) == (4, 17)
    assert (answer.prefill_tokens, answer.reused_tokens) == (20, 4)
    assert [replica.vocab_size for replica in answer.replicas] == [320, 320]
    assert [replica.attention for replica in answer.replicas] == ["paged", "paged"]
    assert {replica.drafter for replica in answer.replicas} == {"suffix"}
    assert {replica.arithmetic for replica in answer.replicas} == {"joined layers"}


def test_a_status_answer_has_all_that_the_pool_expects_of_a_replica() -> None:
    expected = CostEstimates(5, 2, 0.03, 0.004, 0.8, 0.6, 1.25)
    one = replace(replica_status("a", 3, 12), estimates=expected)
    view = PoolView("one", 2.0, PoolStatus(0, 0, (one,), finished={}))
    told = to_status(view).replicas[0].cost_estimates
    assert {field.name for field in fields(CostEstimates)} == {
        field.name for field in pb.CostEstimates.DESCRIPTOR.fields
    }
    for field in fields(CostEstimates):
        assert getattr(told, field.name) == getattr(expected, field.name), field.name
