"""Proves that what a message leaves out asks for nothing and counts nothing."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from scheduler.config import DRAFT_LEN_MAX, SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.draft_length import CostEstimates
from scheduler.messages import (
    Batch,
    BatchKind,
    FailureRecord,
    Finish,
    FinishReason,
    PrefillRow,
    Priority,
    ReplicaSpec,
    Request,
    RowResult,
    Sampling,
    StepResult,
    StepRow,
    StepTimes,
    Submit,
    Usage,
)
from scheduler.scaling import ShardLoad
from scheduler.state import BatchFigures
from scheduler.status import PoolStatus, ReplicaStatus
from scheduler.validation import check_request

SPEC = ReplicaSpec(kv_blocks=10, block_size=4, context_len=64, vocab_size=100)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (RowResult("a"), 1),
        (StepTimes(), 0),
        (FailureRecord(), 0),
        (BatchFigures(), 0),
        (CostEstimates(), 0),
        (Usage(), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sums_and_counts_begin_with_nothing(message: object, said: int) -> None:
    """`said`: fields that are no count."""
    assert not any(astuple(message)[said:])


def test_an_answer_and_a_status_that_say_no_more_count_nothing() -> None:
    assert StepResult(1, "r", ()).steps == 0
    assert Finish("a", FinishReason.STOP).usage == Usage()
    replica = ReplicaStatus("r", SPEC)
    assert (replica.residents, replica.batches_in_flight, replica.kv_blocks_used) == (0, 0, 0)
    assert not replica.draining
    pool = PoolStatus(0, 0, (), {})
    assert (pool.waiting_tokens, pool.outstanding_tokens, pool.tokens_per_s) == (0, 0, 0.0)
    assert (pool.preempted, pool.moved, pool.recovered) == (0, 0, 0)


def test_a_request_that_says_no_more_is_greedy_over_all_tokens_and_can_be_served() -> None:
    request = Request("a", (1, 2, 3), 8)
    check_request(request, SchedulerConfig(), SPEC)
    assert request.sampling == Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    assert (request.length_max, request.length_expected) == (11, 11)
    assert replace(request, expected_new_tokens=0).length_expected == 3
    assert replace(request, expected_new_tokens=5).length_expected == 8
    submit = Submit(request)
    assert not submit.admitted_before
    assert not submit.validated
    assert not Decoding(3).changes_logits


def test_a_batch_is_one_step_without_drafts_and_a_prefill_row_is_filled_but_for_the_last() -> None:
    row = PrefillRow("a", (1, 2, 3), 8, Sampling(), (), blocks=3)
    batch = Batch(1, "r", BatchKind.PREFILL, prefill=(row,))
    assert (row.begin, row.end, batch.prefill_tokens) == (0, 2, 2)
    later = replace(batch, prefill=(row, replace(row, begin=4, until=9)))
    assert later.prefill_tokens == 2 + 5
    assert (batch.steps, batch.draft_len, batch.row_ids) == (1, 0, ["a"])


def test_a_batchs_spread_is_from_its_shortest_row_to_its_longest() -> None:
    rows = tuple(StepRow(str(length), length, 0, 9) for length in (5, 7, 11))
    assert Batch(1, "r", BatchKind.SPECULATE, rows=rows).spread == 6


def test_a_replica_that_says_no_more_drafts_what_is_asked_and_shares_nothing() -> None:
    assert (SPEC.draft_len_max, SPEC.draft_len, SPEC.rows_max) == (DRAFT_LEN_MAX, None, None)
    assert (SPEC.prefix_sharing, SPEC.overlaps, SPEC.texts_kept) == (False, False, 0)
    assert (SPEC.embedding_size, SPEC.logits_size, SPEC.length_max) == (0, 100, 40)


def test_what_a_replica_measured_makes_it_no_other_replica() -> None:
    """Times differ at each start."""
    batch = Batch(1, "r", BatchKind.SPECULATE)
    assert replace(SPEC, acceptance=0.5, trials=((batch, StepResult(1, "r", ())),)) == SPEC
    assert replace(SPEC, draft_len=2) != SPEC


def test_each_class_of_priority_is_one_step_below_the_one_before() -> None:
    """A request passes the next class once it has waited for one age, the one after it for two."""
    assert [*Priority] == [0, 1, 2]


def test_a_record_is_cleared_by_content_beyond_where_it_broke_and_then_beyond_quarantine() -> None:
    record = FailureRecord(2, 1, 1, rows_limit=3, broke_at=10, quarantined_until=14)
    assert record.at(10) == record
    assert record.at(11) == record.at(14) == replace(record, failures=0)
    assert record.at(15) == replace(record, failures=0, rows_limit=None)


def test_a_shard_of_which_nothing_is_known_answers_and_has_no_replica() -> None:
    load = ShardLoad()
    assert load.answers
    assert (load.serving, load.outstanding_tokens, load.expected_share) == (0, 0, 1.0)
    assert not load.holds(1)
