"""Proves that the fake replica objects to what a real one would, and that its world is perfect."""

from __future__ import annotations

from random import Random

import pytest

from scheduler.config import SchedulerConfig
from scheduler.fake_replica import FakeReplica, perfect_world
from scheduler.messages import (
    Batch,
    BatchKind,
    FinishReason,
    PrefillRow,
    Release,
    ReplicaSpec,
    Request,
    SamplingParams,
    StepRow,
)
from scheduler.simulator import Trouble, World

SPEC = ReplicaSpec(kv_blocks=10, block_size=4, context_len=64, vocab_size=100)


def prefill(batch_id: int, *names: str, tokens: int = 3, left: int = 5) -> Batch:
    rows = tuple(
        PrefillRow(name, (1,) * tokens, left, SamplingParams(), (), -(-(tokens + left) // 4))
        for name in names
    )
    return Batch(batch_id, "r", BatchKind.PREFILL, prefill=rows)


def steps(batch_id: int, *rows: StepRow, count: int = 1) -> Batch:
    draft_len = max(row.draft_len for row in rows)
    return Batch(batch_id, "r", BatchKind.SPECULATE, (), rows, draft_len, count)


@pytest.fixture
def replica() -> FakeReplica:
    replica = FakeReplica("r", SPEC, 1.0, Random(0))
    batch = prefill(1, "a")
    replica.receive(batch)
    replica.run(batch, 0.1)
    replica.end(batch)
    return replica


@pytest.mark.parametrize(
    "batch",
    [
        steps(2, StepRow("stranger", 3, 2, 10)),
        steps(1, StepRow("a", 3, 2, 10)),  # a batch id twice
        steps(2, StepRow("a", 3, 2, 10), StepRow("a", 3, 2, 10)),
        prefill(2, "a"),
        prefill(2, "b", "b"),
        Batch(2, "elsewhere", BatchKind.SPECULATE, rows=(StepRow("a", 3, 0, 10),)),
        Batch(2, "r", BatchKind.SPECULATE),
        Batch(2, "r", BatchKind.SPECULATE, rows=(StepRow("a", 3, 3, 10),), draft_len=1),
    ],
)
def test_a_batch_that_a_real_replica_could_not_obey_is_an_assertion(
    replica: FakeReplica, batch: Batch
) -> None:
    with pytest.raises(AssertionError):
        replica.receive(batch)


@pytest.mark.parametrize(
    "batch", [steps(2, StepRow("a", 4, 2, 10)), prefill(2, "b", left=36), prefill(2, "b", left=62)]
)
def test_wrong_lengths_and_missing_blocks_are_found_when_it_runs(
    replica: FakeReplica, batch: Batch
) -> None:
    replica.receive(batch)
    with pytest.raises(AssertionError):
        replica.run(batch, 0.1)


def test_a_row_is_not_released_while_a_batch_holds_it(replica: FakeReplica) -> None:
    batch = steps(2, StepRow("a", 3, 2, 10))
    replica.receive(batch)
    with pytest.raises(AssertionError):
        replica.release(Release("r", ("a",)))
    replica.run(batch, 0.1)
    replica.end(batch)
    replica.release(Release("r", ("a",)))
    assert replica.residents == 0


def test_a_batch_ends_early_once_a_row_has_finished(replica: FakeReplica) -> None:
    batch = steps(2, StepRow("a", 3, 1, 10), count=10)
    replica.receive(batch)
    result = replica.run(batch, 0.1)
    (row,) = result.rows
    assert (result.steps, row.draft_tokens, row.accepted_at) == (3, 2, (2,))
    assert len(row.tokens) == 5
    assert result.times.total_s == pytest.approx(0.3)


def test_the_perfect_world_depends_on_content_and_seed_alone() -> None:
    request = Request("a", (1, 2, 3), 20)
    tokens, reason = perfect_world(request, 100)
    assert (len(tokens), reason) == (20, FinishReason.LENGTH)
    assert perfect_world(Request("b", (1, 2, 3), 20, committed=tokens[:7]), 100)[0] == tokens
    assert perfect_world(Request("a", (1, 2, 4), 20), 100)[0] != tokens
    assert perfect_world(Request("a", (1, 2, 3), 20, SamplingParams(seed=1)), 100)[0] != tokens
    stopped = Request("a", (tokens[5], 2, 3), 20, stop_token_ids=(tokens[5],))
    assert perfect_world(stopped, 100)[0] != ()


def world(acceptance: float, trouble: Trouble | None = None) -> World:
    made = World(Random(1), SchedulerConfig(), acceptance=acceptance, trouble=trouble)
    made.join(0.0, "r", ReplicaSpec(1000, 4, 500, 100))
    for index in range(16):
        made.submit(0.01 * index, Request(str(index), (index + 1,) * (index + 1), 40))
    return made


def test_tokens_do_not_depend_on_the_draft_or_on_trouble() -> None:
    runs = [
        world(0.0).run(),
        world(1.0).run(),
        world(0.6, Trouble((0.0, 0.05), duplicate=0.5, lose=0.05)).run(),
    ]
    assert len({tuple(tuple(one.tokens) for one in run.outcomes.values()) for run in runs}) == 1
    assert runs[1].ended_s < runs[0].ended_s < runs[2].ended_s


def test_the_report_says_how_busy_the_replicas_were() -> None:
    report = world(0.7).run()
    assert 0.5 < report.utilisation <= 1.0
    assert 1 <= report.rows_mean <= 8
    assert report.spread_mean >= 0
    for outcome in report.outcomes.values():
        assert outcome.first_token_s is not None
        assert outcome.finished_s is not None
        assert outcome.submitted_s < outcome.first_token_s <= outcome.finished_s


def test_the_step_time_is_an_argument() -> None:
    slow = World(Random(1), step_time=lambda batch: 10.0)
    slow.join(0.0, "r", SPEC)
    slow.submit(0.0, Request("a", (1,), 1))
    outcome = slow.run().outcomes["a"]
    assert outcome.finished_s is not None
    assert 20.0 < outcome.finished_s < 20.1
